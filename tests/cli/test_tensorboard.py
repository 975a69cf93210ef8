"""Event files hold the points of the curves, each once, after any interruption; TensorBoard reads them back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY, Outcome
from crmatch.cli.tensorboard import EventFile, scalars
from crmatch.errors import StoppedError
from crmatch.runs.directory import RunDirectory

Command = Callable[..., Outcome]


def read_back(run: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, of all event files; a point that is there twice fails."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    points: dict[str, dict[int, float]] = {}
    for path in (run / "tensorboard").iterdir():
        for event in map(Event.FromString, RawEventFileLoader(str(path)).Load()):
            for value in event.summary.value:
                assert event.step not in points.setdefault(value.tag, {})
                points[value.tag][event.step] = value.simple_value
    return points


def expected(run: Path) -> dict[str, dict[int, float]]:
    """What the curves say; events hold single precision."""
    points: dict[str, dict[int, float]] = {}
    for line in RunDirectory(run).read_metrics():
        for tag, value in scalars(line):
            points.setdefault(tag, {})[line["step"]] = pytest.approx(value, rel=1e-6)
    return points


def train(crmatch: Command, stripes: Path, out: Path) -> Outcome:
    words = [f"--set={key}={value}" for key, value in {**TINY, "method.rotation_images": 4}.items()]
    return crmatch("train", "stripes@2", "--data-dir", stripes, "--out", out, *words, "--json", "--tensorboard")


def test_a_resumed_run_has_every_point_once(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'crmatch[tensorboard]'")
    log = EventFile.log

    def fail_at_15(events: EventFile, line: Any) -> None:
        log(events, line)
        if line["step"] == 15:  # after the checkpoint of step 12, before that of step 16
            raise StoppedError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(EventFile, "log", fail_at_15)
        assert train(crmatch, stripes, tmp_path / "runs").code == 75
    outcome = train(crmatch, stripes, tmp_path / "runs")
    run = Path(json.loads(outcome.out)["run"])
    points = read_back(run)
    assert points == expected(run)
    assert list(points["train/loss_total"]) == [3, 5, 6, 9, 10, 12, 15, 18, 20]
    assert list(points["eval/error_ema"]) == list(points["eval/error_raw"]) == [5, 10, 15, 20]
    assert {"train/mask_rate", "train/loss_supervised", "pl/error_all", "sys/images_per_second"} <= set(points)
    for file in (run / "tensorboard").iterdir():
        file.unlink()
    assert train(crmatch, stripes, tmp_path / "runs").code == 0
    assert read_back(run) == points


def test_values_that_are_missing_at_a_step_give_no_point() -> None:
    line = {"step": 3, "loss/total": 2.5, "monitor/cosine": 0.5, "contributing_error": None, "pseudo_label_error": 40.0}
    assert dict(scalars(line)) == {"train/loss_total": 2.5, "train/cosine": 0.5, "pl/error_all": 40.0}


def test_without_tensorboard_it_says_what_to_install(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    outcome = train(crmatch, stripes, tmp_path / "runs")
    assert outcome.code == 2
    assert "pip install 'crmatch[tensorboard]'" in outcome.err
    assert not (tmp_path / "runs").exists()
