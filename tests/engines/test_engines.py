"""What engines share: a run trained to its record or to a problem of its own, and an end that is reported as it was."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from filelock import FileLock

from conftest import tiny_spec
from crmatch.engines.local import RunOutcome, WorkerProcesses, train_one
from crmatch.errors import DataError, StoppedError
from crmatch.runs.workspace import Workspace
from crmatch.training.execution import Execution


def test_a_run_waits_for_its_directory_as_long_as_it_is_told_to(stripes: Path, tmp_path: Path) -> None:
    spec, workspace = tiny_spec(stripes, **{"plan.steps": 2}), Workspace.at(tmp_path / "runs", stripes)
    directory = workspace.run_directory(spec)
    directory.path.mkdir(parents=True)
    lock = FileLock(directory.lock, thread_local=False)
    with lock:
        impatient = train_one(spec, workspace, Execution(), lambda: False)
        stopped = train_one(spec, workspace, Execution(), lambda: True, patience=60)
        assert impatient.problem == stopped.problem == f"{directory.path} is in use by another process."
        threading.Timer(0.5, lambda: lock.release(force=True)).start()
        assert train_one(spec, workspace, Execution(), lambda: False, patience=60).problem == ""
    assert directory.record.exists()


@pytest.mark.process
def test_worker_processes_report_each_run_and_no_stop_after_the_last_one(stripes: Path, tmp_path: Path) -> None:
    """A signal that arrives after the last run has ended changes nothing; one that arrives earlier leaves runs."""
    workspace = Workspace.at(tmp_path / "runs", stripes)
    good, bad = tiny_spec(stripes, **{"plan.steps": 2}), tiny_spec(stripes, **{"plan.learning_rate": 1e12})
    ended: list[RunOutcome] = []
    engine = WorkerProcesses(workspace, Execution("cpu"), jobs=2)
    engine.train_all([good, bad], ended.append, stop=lambda: len(ended) == 2)
    outcomes = dict(ended)
    assert outcomes[good] == ""
    assert workspace.run_directory(good).record.exists()
    assert outcomes[bad].startswith("diverged: ")
    assert "is not finite at step" in outcomes[bad]
    with pytest.raises(StoppedError, match="stopped with 2 runs left"):
        engine.train_all([good, bad], ended.append, stop=lambda: True)


@pytest.mark.process
def test_a_failure_that_concerns_all_runs_ends_worker_processes(stripes: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    engine = WorkerProcesses(Workspace.at(tmp_path / "runs", stripes), Execution("cpu"), jobs=2)
    with pytest.raises(DataError, match=r"cannot write to .*\nChoose a directory you may write to with --out\."):
        engine.train_all([tiny_spec(stripes, seed=seed) for seed in range(9)], lambda outcome: None, lambda: False)
