"""What earlier versions have written (write_corpus.py) is read, or refused with the reason and the version that can."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import crmatch as package
from conftest import Command
from crmatch.data.load import load_data
from crmatch.errors import ResumeError
from crmatch.runs.directory import RunDirectory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import NUMERICS
from crmatch.training.checkpoint import load_checkpoint, save_checkpoint

VERSIONS = sorted(Path(__file__).parent.glob("written_by_*"))


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, because some commands write."""
    return Path(shutil.copytree(request.param, tmp_path / "corpus"))


def test_there_are_old_files() -> None:
    assert VERSIONS


def test_records_curves_and_models_are_listed_reported_and_evaluated(crmatch: Command, corpus: Path) -> None:
    listed = crmatch("runs", corpus, "--data-dir", corpus / "data", "--json")
    assert listed.code == 0, listed.err
    states = {Path(row["run"]).name: row["state"] for row in json.loads(listed.out)["rows"]}
    assert states == {"finished": "finished", "baseline": "finished", "stopped": "unfinished"}
    report = crmatch("report", corpus, "--data-dir", corpus / "data", "--out", corpus / "report.html")
    assert report.code == 0, report.err
    page = (corpus / "report.html").read_text()
    assert "Test error" in page
    assert "cannot be" not in page
    evaluated = crmatch("evaluate", corpus / "finished", "--data-dir", corpus / "data", "--json")
    assert evaluated.code == 0, evaluated.err
    assert json.loads(evaluated.out)["error"] == package.records(corpus / "finished")[corpus / "finished"].error


def test_a_model_predicts_what_it_predicted_then(corpus: Path) -> None:
    test = load_data("stripes", corpus / "data").test
    assert test is not None
    found = package.load(corpus / "finished").predict_probabilities(test.images)
    expected = torch.tensor(json.loads((corpus / "probabilities.json").read_text()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def stopped(corpus: Path) -> tuple[Workspace, RunDirectory]:
    """The stopped run, in the directory in which this version looks for it."""
    workspace, spec = Workspace.at(corpus / "runs", corpus / "data"), RunDirectory(corpus / "stopped").read_spec()
    assert spec is not None
    directory = workspace.run_directory(spec)
    shutil.copytree(corpus / "stopped", directory.path)
    return workspace, directory


def test_a_checkpoint_of_other_numerics_is_refused_with_the_version_that_can_continue_it(corpus: Path) -> None:
    workspace, directory = stopped(corpus)
    spec, checkpoint = directory.read_spec(), load_checkpoint(directory.checkpoints)
    assert spec is not None
    assert checkpoint is not None
    with pytest.raises(ResumeError, match=rf"numerics 3; this version has {NUMERICS}\.\nUse .* 7ed868c for it"):
        run(spec, workspace)
    later = {**checkpoint.values, "numerics": NUMERICS + 1, "version": "crmatch 9.1"}
    save_checkpoint(directory.checkpoints, checkpoint._replace(values=later))
    with pytest.raises(ResumeError, match=r"Use crmatch 9\.1 for it"):
        run(spec, workspace)


@pytest.mark.parametrize("name", ["stopped", "finished"])
def test_todays_command_in_the_place_of_an_old_run_names_the_version_too(crmatch: Command, corpus: Path, name: str) -> None:
    """Its recipe has changed since then, so the specs differ."""
    shutil.copytree(corpus / name, corpus / "runs" / "stripes@2" / "crmatch" / "split1-seed0")
    said = crmatch("train", "stripes@2", "--data-dir", corpus / "data", "--out", corpus / "runs")
    assert said.code == 4
    assert "numerics 3" in said.err
    assert "7ed868c" in said.err


def test_a_checkpoint_of_the_same_numerics_is_continued(corpus: Path) -> None:
    """As if numerics had not changed since: the format is still read."""
    workspace, directory = stopped(corpus)
    checkpoint, spec = load_checkpoint(directory.checkpoints), directory.read_spec()
    assert checkpoint is not None
    assert spec is not None
    save_checkpoint(directory.checkpoints, checkpoint._replace(values={**checkpoint.values, "numerics": NUMERICS}))
    record = run(spec, workspace)
    assert record.steps == 8
    assert [line["step"] for line in directory.read_metrics()] == [2, 4, 6, 8]
