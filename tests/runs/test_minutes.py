from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Command
from crmatch.runs.directory import RunDirectory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import parse_spec


def test_a_run_with_minutes_resumes_to_the_bit(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the network of `quick`, whose first layer is computed from the images."""
    monkeypatch.setattr("crmatch.runs.timing.RESERVE", 0.2)  # plan for about a second
    out = tmp_path / "runs"
    command = ["train", "stripes@2", "--minutes", "0.1", "--set=network.filters=4", "--data-dir", stripes, "--out", out]
    polls = iter(range(5))
    monkeypatch.setattr("crmatch.cli.session.stop_request", lambda: lambda: next(polls, None) is None)
    assert crmatch(*command).code == 75
    monkeypatch.setattr("crmatch.cli.session.stop_request", lambda: lambda: False)
    assert crmatch(*command).code == 0
    (model,) = out.rglob("model.safetensors")
    spec = parse_spec(json.loads(RunDirectory(model.parent).spec.read_text()))
    assert spec.network.kind == "fast"
    assert spec.plan.minutes == 0.1
    run(spec, Workspace.at(tmp_path / "undisturbed", stripes))
    (other,) = (tmp_path / "undisturbed").rglob("model.safetensors")
    assert other.read_bytes() == model.read_bytes()
