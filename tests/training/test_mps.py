"""`--device mps` on a fake Apple GPU: tensors that are said to be there, that know no float64 and meet no tensors of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from conftest import Outcome, tiny_spec
from crmatch.errors import RequestError
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime

MPS = torch.device("mps")


class FakeMPS(TorchFunctionMode):
    """Marks tensors as being on the GPU and computes on the CPU."""

    moves = (Tensor.to, Tensor.cpu, Tensor.tolist, Tensor.item, Tensor.copy_, Tensor.data.__set__, torch.nn.Module.to)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        inside = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        there = any(getattr(value, "on_mps", False) for value in inside)
        if function is Tensor.device.__get__:
            return MPS if there else function(*args)
        asked = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.device)]
        if isinstance(kwargs.get("device"), str):
            asked.append(torch.device(kwargs["device"]))
        args, kwargs = tree_map(lambda value: torch.device("cpu") if value == MPS else value, (args, kwargs))
        if function is Tensor.data.__set__ or function is Tensor.copy_:
            there = getattr(args[0 if function is Tensor.copy_ else 1], "on_mps", False)
        elif function not in self.moves:
            strangers = [value for value in inside if value.ndim and not getattr(value, "on_mps", False)]
            assert not (there and strangers), f"{function} mixes devices"
        result = function(*args, **kwargs)
        if asked:
            there = asked[-1] == MPS
        elif function in (Tensor.cpu, Tensor.tolist, Tensor.item):
            there = False
        for value in [*tree_flatten(result)[0], *(args[:1] if function is Tensor.data.__set__ else [])]:
            if isinstance(value, Tensor):
                assert not (there and value.dtype == torch.float64), f"{function} makes float64 on mps"
                value.on_mps = there  # type: ignore[attr-defined]
        return result


@pytest.mark.parametrize("method", ["crmatch", "mixmatch", "featmatch", "label_propagation"])
@pytest.mark.parametrize("policy", ["randaugment", "ctaugment"])
def test_a_run_keeps_float64_and_tensors_of_the_cpu_away_from_the_gpu(
    stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, policy: str
) -> None:
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    spec = tiny_spec(stripes, method, **{"augmentation.policy": policy, "plan.steps": 6})
    with FakeMPS():
        record = run(spec, Workspace(tmp_path, stripes), Execution("mps"))
    assert record.machine["device"] == "mps"
    assert record.error is not None


def test_mps_is_refused_where_it_cannot_work(
    crmatch: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = crmatch("train", "digits@4", "--device", "mps", "--out", tmp_path)
    assert (outcome.code, "no device 'mps'" in outcome.err) == (2, True)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert choose_runtime(Execution("mps")).data_device.type == "cpu"
    with pytest.raises(RequestError, match="--precision fp32"):
        choose_runtime(Execution("mps"), "fp64")
