from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import Command
from crmatch.data.settings import parse_setting
from crmatch.runs.directory import RunDirectory, train_command
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import parse_spec, replace


def test_a_run_with_minutes_resumes_to_the_bit(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the network of `quick`, whose first layer is computed from the images."""
    monkeypatch.setattr("crmatch.runs.timing.RESERVE", 0.2)  # plan for about a second
    out = tmp_path / "runs"
    command = ["train", "stripes@2", "--minutes", "0.1", "--set=network.filters=4", "--data-dir", stripes, "--out", out]
    polls = iter(range(5))
    monkeypatch.setattr("crmatch.cli.session.stop_request", lambda: lambda: next(polls, None) is None)
    stopped = crmatch(*command)
    assert stopped.code == 75
    assert "px, chosen to fit into 0.1 minutes" in stopped.err  # no estimate that contradicts the time asked for
    monkeypatch.setattr("crmatch.cli.session.stop_request", lambda: lambda: False)
    assert crmatch(*command).code == 0
    (model,) = out.rglob("model.safetensors")
    spec = parse_spec(json.loads(RunDirectory(model.parent).spec.read_text()))
    assert spec.network.kind == "fast"
    assert spec.plan.minutes == 0.1
    run(spec, Workspace.at(tmp_path / "undisturbed", stripes))
    (other,) = (tmp_path / "undisturbed").rglob("model.safetensors")
    assert other.read_bytes() == model.read_bytes()


@pytest.fixture
def noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of 32 pixels in `tmp_path`, and runs of two steps whatever their time is."""
    images, labels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8), np.arange(40) % 2
    np.savez(tmp_path / "noise.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    monkeypatch.setattr("crmatch.cli.session.fit_steps", lambda experiment, _: replace(experiment.spec, **{"plan.steps": 2}))


@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize(("minutes", "size"), [(4.9, 20), (5, 32)])
def test_images_of_quick_are_larger_from_five_minutes_on(crmatch: Command, tmp_path: Path, minutes: float, size: int) -> None:
    """A given size counts all the same. Only a size that the time does not explain is part of the run's name and command."""
    command = ["train", "noise@2", "--minutes", minutes, "--set=network.filters=1", "--data-dir", tmp_path, "--out", tmp_path]
    variant = f"crmatch-filters=1,minutes={minutes:g}"
    for options, name, expected in (([], variant, size), (["--image-size", 24], f"crmatch-image_size=24,{variant[8:]}", 24)):
        assert crmatch(*command, *options).code == 0
        spec = RunDirectory(tmp_path / "noise@2" / name / "split1-seed0").read_spec()
        assert spec is not None
        assert spec.data.image_size == expected
        again = train_command(spec, parse_setting("noise@2", tmp_path))
        assert ("image_size" in again) == bool(options)
        assert f"--minutes {minutes}" in again
        assert "start_size" not in again
    wrong = crmatch(*command, "--set", "data.image_size=large")
    assert wrong.code == 2
    assert "data.image_size" in wrong.err


@pytest.mark.usefixtures("noise")
def test_how_a_long_run_begins_is_part_of_its_name_only_if_it_was_given_and_the_next_round_begins_so_too(
    crmatch: Command, tmp_path: Path
) -> None:
    command = ["train", "noise@2", "--minutes", 5, "--data-dir", tmp_path, "--out", tmp_path]
    one_size = ["--set", "plan.start_size=null"]
    for options, name, expected in (([], "crmatch-minutes=5", 20), (one_size, "crmatch-minutes=5,start_size=None", None)):
        assert crmatch(*command, "--set=network.filters=1", *options).code == 0
        run = tmp_path / "noise@2" / name.replace("-", "-filters=1,") / "split1-seed0"
        spec = RunDirectory(run).read_spec()
        assert spec is not None
        assert spec.plan.start_size == expected
        assert ("start_size" in train_command(spec, parse_setting("noise@2", tmp_path))) == bool(options)
        second = json.loads(crmatch(*command, "--from", run, "--json").out)
        assert second["spec"]["plan"]["start_size"] == expected
        smaller = json.loads(crmatch(*command, "--from", run, "--image-size", 16, "--json").out)
        assert smaller["spec"]["plan"]["start_size"] is None


def test_other_options_under_the_name_of_a_run_with_minutes_are_refused(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crmatch.cli.session.fit_steps", lambda experiment, _: replace(experiment.spec, **{"plan.steps": 1}))
    command = ["train", "stripes@2", "--minutes", 1, "--name", "mine", "--set=network.filters=1"]
    command += ["--data-dir", stripes, "--out", tmp_path / "runs"]
    assert crmatch(*command).code == 0
    assert crmatch(*command).code == 0
    refused = crmatch(*command, "--set", "method.threshold=0.5")
    assert refused.code == 2
    assert "method.threshold is 0.95 there, 0.5 here" in refused.err
