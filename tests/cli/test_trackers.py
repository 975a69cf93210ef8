"""Trackers hold the points of the curves, each once, after any interruption; each tool's own reader reads them back."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from conftest import TINY_OPTIONS, Outcome
from crmatch.cli.trackers import TrackedProgress, scalars
from crmatch.errors import DataError, StoppedError
from crmatch.runs.directory import RunDirectory

Command = Callable[..., Outcome]
Point = tuple[str, int, float]


def tensorboard_points(run: Path) -> Iterator[Point]:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for path in (run / "tensorboard").iterdir():
        for event in map(Event.FromString, RawEventFileLoader(str(path)).Load()):
            yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)


def mlflow_points(run: Path) -> Iterator[Point]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run.parents[2] / "mlruns").as_uri())
    (experiment,) = (one for one in client.search_experiments() if one.name == "stripes@2")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["plan.steps"] == "20"
    for tag in found.data.metrics:
        yield from ((tag, point.step, point.value) for point in client.get_metric_history(found.info.run_id, tag))


def wandb_points(run: Path) -> Iterator[Point]:
    """The package has no reader of its files: blocks of 32 KiB with parts of records, as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    content, record, place = path.read_bytes(), b"", 7
    while place < len(content):
        if (rest := -place % 32768) < 7:
            place += rest  # no room for the header of a part: checksum, length, kind
        length, kind = struct.unpack_from("<HB", content, place + 4)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            history, record = Record.FromString(record).history, b""
            values = {"/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
            yield from ((tag, history.step.num, value) for tag, value in values.items() if not tag.startswith("_"))


READERS = {"tensorboard": tensorboard_points, "mlflow": mlflow_points, "wandb": wandb_points}


def read_back(tool: str, run: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value; a point that is there twice fails."""
    points: dict[str, dict[int, float]] = {}
    for tag, step, value in READERS[tool](run):
        assert step not in points.setdefault(tag, {})
        points[tag][step] = value
    return points


def expected(run: Path) -> dict[str, dict[int, float]]:
    """What the curves say; TensorBoard's events hold single precision."""
    points: dict[str, dict[int, float]] = {}
    for line in RunDirectory(run).read_metrics():
        for tag, value in scalars(line):
            points.setdefault(tag, {})[line["step"]] = pytest.approx(value, rel=1e-6)
    return points


def train(crmatch: Command, stripes: Path, out: Path, *options: str) -> Outcome:
    return crmatch("train", "stripes@2", "--data-dir", stripes, "--out", out, *TINY_OPTIONS, "--json", *options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:(google|wandb|mlflow).*")
@pytest.mark.parametrize(
    "tool", ["tensorboard", *(pytest.param(tool, marks=pytest.mark.process) for tool in ("mlflow", "wandb"))]
)
def test_a_resumed_run_has_every_point_once(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    pytest.importorskip(tool, reason=f"{tool} is not installed: pip install 'crmatch[{tool}]'")
    monkeypatch.setenv("HOME", str(tmp_path))  # MLflow and Weights & Biases keep settings and logs there
    log = TrackedProgress.log
    options = ["--tensorboard"] if tool == "tensorboard" else ["--tracker", tool]

    def fail_at_15(progress: TrackedProgress, line: Any) -> None:
        log(progress, line)
        if line["step"] == 15:  # after the checkpoint of step 12, before that of step 16
            raise StoppedError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(TrackedProgress, "log", fail_at_15)
        assert train(crmatch, stripes, tmp_path / "runs", *options).code == 75
    outcome = train(crmatch, stripes, tmp_path / "runs", *options)
    assert outcome.code == 0, outcome.err
    run = Path(json.loads(outcome.out)["run"])
    points, wanted = read_back(tool, run), expected(run)
    speed = ("sys/images_per_second", "sys/seconds")
    if tool == "mlflow":  # step 15 keeps the speed of the first time
        points, wanted = ({tag: curve for tag, curve in one.items() if tag not in speed} for one in (points, wanted))
    assert points == wanted
    assert list(points["train/loss_total"]) == [3, 5, 6, 9, 10, 12, 15, 18, 20]
    assert list(points["eval/error_ema"]) == list(points["eval/error_raw"]) == [5, 10, 15, 20]
    assert {"train/mask_rate", "train/loss_supervised", "pl/error_all"} <= set(points)
    again = train(crmatch, stripes, tmp_path / "runs", *options)  # finished before
    assert again.code == 0
    assert points.items() <= read_back(tool, run).items()


@pytest.mark.process
def test_a_finished_run_can_be_passed_to_several_trackers_later(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'crmatch[tensorboard]'")
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'crmatch[mlflow]'")
    run = Path(json.loads(train(crmatch, stripes, tmp_path / "runs").out)["run"])
    assert train(crmatch, stripes, tmp_path / "runs", "--tracker", "tensorboard", "--tracker", "mlflow").code == 0
    for tool in ("tensorboard", "mlflow"):
        assert read_back(tool, run) == expected(run)


def test_a_tracker_that_cannot_write_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    class Full:
        errors = (OSError,)

        def begin(self, lines: Any) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"Full cannot write .*No space left"):
        TrackedProgress(Full(), RunDirectory(tmp_path), Mock()).start(0, 20)


def test_values_that_are_missing_at_a_step_give_no_point() -> None:
    line = {"step": 3, "loss/total": 2.5, "monitor/cosine": 0.5, "contributing_error": None, "pseudo_label_error": 40.0}
    assert dict(scalars(line)) == {"train/loss_total": 2.5, "train/cosine": 0.5, "pl/error_all": 40.0}


@pytest.mark.parametrize("tool", READERS)
def test_without_its_package_a_tracker_says_what_to_install(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    monkeypatch.setitem(sys.modules, tool, None)
    outcome = train(crmatch, stripes, tmp_path / "runs", "--tracker", tool)
    assert outcome.code == 2
    assert f"pip install 'crmatch[{tool}]'" in outcome.err
    assert not (tmp_path / "runs").exists()
