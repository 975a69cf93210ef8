"""Fixtures shared by all tests: tiny data, tiny specs, the command line in-process."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
import typer.main

os.environ["COLUMNS"] = "200"
pytest_plugins = ["pretrained_runs"]
hypothesis.settings.register_profile("tests", deadline=None)  # a shared machine may stand still for seconds
hypothesis.settings.load_profile("tests")
# The tests' networks are tiny: a second thread only waits. Programs that tests start take it from the environment.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
QUICK = os.environ.get("CRMATCH_QUICK") == "1"
"""Set by `make quick`: tests that try very many cases try fewer of them."""
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _own_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor write the user's data directory, and do not wait until their files have reached the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRMATCH_DATA", str(tmp_path_factory.mktemp("data")))
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _only_marked_tests_start_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make quick` leaves out tests that start a process, so they must be marked.

    Records call git for the commit. When matplotlib is first used on a machine, it calls fc-list.
    """
    if request.node.get_closest_marker("process") is not None:
        return
    start = subprocess.Popen.__init__

    def checked(self: Any, args: Any, *others: Any, **options: Any) -> None:
        assert args[0] in ("git", "fc-list"), f"this test starts a process: mark it with @pytest.mark.process ({args!r:.200})"
        start(self, args, *others, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", checked)


@pytest.fixture(autouse=True)
def _folders_train_from_scratch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the extra `pretrained` is installed changes the default for folders; only its own tests depend on it."""
    if request.path.parent.name != "pretrained" and request.path.name != "test_guide.py":
        monkeypatch.setattr("crmatch.spec.recipes.backbone_is_installed", lambda: False)


_get_command = functools.cache(typer.main.get_command)  # building the commands takes longer than running most of them


def exit_code(arguments: Sequence[object]) -> int:
    """Run a command in this process."""
    import signal

    from crmatch.cli import app as cli
    from crmatch.runs.signals import SIGNALS

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with mock.patch("sys.argv", ["crmatch", *map(str, arguments)]), mock.patch("typer.main.get_command", _get_command):
            cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


@pytest.fixture
def crmatch(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process: exit code, stdout and stderr."""

    def call(*arguments: object) -> Outcome:
        code = exit_code(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A loopback server that serves files well or badly, reached without a proxy."""
    from official_archives import loopback

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with loopback() as running:
        yield running


def write_packed(
    path: Path, *, classes: int = 3, per_class: int = 12, side: int = 16, channels: int = 3, **changes: Any
) -> Path:
    """A packed set in which class k is a bright stripe at height k, with noise: easy to learn, different for each class."""
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), per_class)
    images = random.integers(0, 80, (len(labels), side, side, channels), dtype=np.uint8)
    height = side // classes
    for row, label in enumerate(labels):
        images[row, label * height : (label + 1) * height] += 150
    arrays: dict[str, Any] = {
        "train_images": images,
        "train_labels": labels,
        "test_images": images[::2],
        "test_labels": labels[::2],
        "class_names": np.array([f"stripe {label}" for label in range(classes)]),
    }
    arrays |= changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


@pytest.fixture
def stripes(tmp_path: Path) -> Path:
    """A data directory with the packed set `stripes`."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_packed(folder / "stripes.npz")
    return folder


TINY: dict[str, Any] = {
    "network": {"kind": "wide_resnet", "filters": 4, "repeat": 1, "norm_momentum": 0.1},
    "plan.steps": 20,
    "plan.labeled_batch_size": 6,
    "plan.unlabeled_batch_size": 12,
    "plan.evaluate_every": 5,
    "plan.log_every": 3,
    "plan.checkpoint_every": 4,
}
SMALLEST: dict[str, Any] = {
    **TINY,
    "network": {"kind": "wide_resnet", "filters": 2, "scales": 1, "repeat": 1},
    "plan.labeled_batch_size": 2,
    "plan.unlabeled_batch_size": 4,
}
"""A step of a few milliseconds, for tests that train hundreds of runs."""


def options(keys: dict[str, Any]) -> list[str]:
    """Keys of a spec as options of a command."""
    return [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]


TINY_OPTIONS = options(TINY | {"method.rotation_images": 4})


def tiny_command(data_dir: Path, out: Path) -> list[object]:
    """The command that trains `tiny_spec`."""
    return ["train", "stripes@2", "--data-dir", data_dir, "--out", out, *TINY_OPTIONS]


def tiny_spec(data_dir: Path, method: str = "crmatch", setting: str = "stripes@2", **changes: Any) -> Any:
    """A run of seconds: 20 steps of a four-filter network on `stripes`."""
    from crmatch.data.settings import parse_setting
    from crmatch.spec.recipes import recipe
    from crmatch.spec.run_spec import replace

    extra = {"crmatch": {"method.rotation_images": 4}, "plcb": {"method.warmup_epochs": 1}}.get(method, {})
    spec = recipe(parse_setting(setting, data_dir), method, "quick")
    network = {**TINY["network"], "normalize_features": spec.network.normalize_features}
    return replace(spec, **{**TINY, "network": network, **extra, **changes})


def training_of(spec: Any, data_dir: Path, **machine: Any) -> Any:
    """The run of `spec` at its beginning, on a machine with these options."""
    return experiment_of(spec, data_dir, **machine).training()


def experiment_of(spec: Any, data_dir: Path, **machine: Any) -> Any:
    """The experiment of `spec`, on a machine with these options."""
    from crmatch.runs.experiment import Experiment, load_run_data
    from crmatch.spec.recipes import setting_of
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime

    data = load_run_data(spec, setting_of(spec, data_dir), data_dir)
    return Experiment(spec, *data, choose_runtime(Execution("cpu", **machine), spec.precision))


class Trained(NamedTuple):
    run: Path
    data_dir: Path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One tiny finished run for all analyses."""
    from finished import stripes_in, train_tiny

    folder = tmp_path_factory.mktemp("trained")
    data_dir = stripes_in(folder / "data")
    return Trained(train_tiny(folder / "runs", data_dir), data_dir)


@pytest.fixture
def finished(trained: Trained, tmp_path: Path) -> Path:
    """A copy of that run, below `tmp_path / "runs"`."""
    out = trained.run.parents[2]
    return shutil.copytree(out, tmp_path / "runs") / trained.run.relative_to(out)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits@4."""
    from crmatch.runs.directory import run_directory
    from crmatch.runs.run import run
    from crmatch.spec.recipes import setting_of

    out = tmp_path_factory.mktemp("runs")
    spec = tiny_spec(out, setting="digits@4", **{"network.filters": 8, "plan.evaluate_every": 20})
    run(spec, out)
    return run_directory(out, spec, setting_of(spec)).path
