"""Compiled training: the same losses up to rounding, running statistics updated once, an error if nothing can be compiled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import tiny_spec, training_of
from crmatch.distributed.process_group import ProcessGroup
from crmatch.errors import RequestError, StoppedError
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.training.checkpoint import load_checkpoint
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
SMALL = {"network.repeat": 1}


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Graphs run by torch's `aot_eager`: all that inductor does but writing and compiling code. Returns the graphs' inputs."""
    find = torch._dynamo.lookup_backend
    shapes: list[tuple[Any, ...]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        shapes.append(tuple(tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor) and value.ndim == 4))
        return find("aot_eager")(graph, inputs)

    monkeypatch.setattr("crmatch.training.runtime.COMPILER", backend)
    return shapes


def losses(training: Any, steps: int = 3) -> list[float]:
    return [training.take_step()[1].total.item() for _ in range(steps)]


def norm_state(training: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in training.network.state_dict().items() if "running" in name or "tracked" in name}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at VAT's perturbed images
@pytest.mark.parametrize("method", ["crmatch", "vat", "mixmatch"])
def test_graphs_give_the_same_losses_and_move_statistics_once(stripes: Path, without_compiler: list[Any], method: str) -> None:
    spec = tiny_spec(stripes, method, **SMALL)
    eager, compiled = training_of(spec, stripes), training_of(spec, stripes, compile=True)
    assert losses(compiled) == pytest.approx(losses(eager), abs=1e-4)
    graphs = len(without_compiler)
    assert 1 <= graphs <= 4
    for name, value in norm_state(eager).items():
        torch.testing.assert_close(norm_state(compiled)[name], value, rtol=1e-3, atol=1e-4)
    losses(compiled)
    compiled.network.eval()
    for rows in (1, 2, 3, 5):
        compiled.network(torch.zeros(rows, 3, 16, 16))
        compiled.ema.network(torch.zeros(rows, 3, 16, 16))
    assert len(without_compiler) == graphs, "later steps, evaluation or the moving average compiled again"
    assert compiled.network.state_dict().keys() == eager.network.state_dict().keys()


def test_if_the_compiler_fails_the_error_says_why_and_what_to_do(stripes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any, inputs: Any) -> Any:
        raise FileNotFoundError("No working C++ compiler found.\nLong story")

    monkeypatch.setattr("crmatch.training.runtime.COMPILER", fail)
    with pytest.raises(RequestError, match=r"No working C\+\+ compiler found.*\nLeave out --compile"):
        training_of(tiny_spec(stripes, "mixmatch", **SMALL), stripes, compile=True).take_step()


def test_compiling_with_several_processes_is_refused() -> None:
    with pytest.raises(RequestError, match="--compile works with one process only"):
        choose_runtime(Execution("cpu", compile=True), processes=ProcessGroup(0, 2))


def test_record_and_checkpoint_say_compiled_and_continuing_otherwise_warns(
    stripes: Path, tmp_path: Path, without_compiler: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    spec = tiny_spec(stripes, "supervised", **SMALL)
    workspace = Workspace(tmp_path, stripes)
    directory = workspace.run_directory(spec)
    for stop, options in ((4, {"compile": True}), (3, {"compile": False})):
        remaining = iter([False] * stop)
        with pytest.raises(StoppedError):
            run(spec, workspace, Execution(**options), stop=lambda left=remaining: next(left, True))  # type: ignore[misc]
        checkpoint = load_checkpoint(directory.checkpoints)
        assert checkpoint is not None
        assert checkpoint.values["compiled"] is options["compile"]
    assert "began with compiled code" in caplog.text
    record = run(spec, workspace, Execution(compile=True))
    assert "began with eager code" in caplog.text
    assert record.machine["compiled"] is True


def test_a_copy_of_a_compiled_network_is_not_compiled(stripes: Path, without_compiler: list[Any]) -> None:
    training = training_of(tiny_spec(stripes, "supervised", **SMALL), stripes, compile=True)
    copy.deepcopy(training.network)(torch.zeros(2, 3, 16, 16))
    assert without_compiler == []


@pytest.mark.slow
def test_compiled_code_gives_the_first_losses_within_a_thousandth(stripes: Path) -> None:
    spec = tiny_spec(stripes, **SMALL)
    compiled = training_of(spec, stripes, compile=True)
    assert losses(compiled) == pytest.approx(losses(training_of(spec, stripes)), abs=1e-3)
