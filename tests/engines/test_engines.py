"""What engines share: one run trained to its record, or to a problem of its own."""

from __future__ import annotations

import threading
from pathlib import Path

from filelock import FileLock

from conftest import tiny_spec
from crmatch.engines.local import RunOptions, train_one
from crmatch.runs.directory import run_directory
from crmatch.spec.recipes import setting_of


def test_a_run_waits_for_its_directory_as_long_as_it_is_told_to(stripes: Path, tmp_path: Path) -> None:
    spec = tiny_spec(stripes, **{"plan.steps": 2})
    store = RunOptions(tmp_path / "runs", stripes, "cpu")
    directory = run_directory(store.out, spec, setting_of(spec, stripes))
    directory.path.mkdir(parents=True)
    lock = FileLock(directory.lock, thread_local=False)
    with lock:
        impatient = train_one(spec, store, lambda: False)
        stopped = train_one(spec, store, lambda: True, patience=60)
        assert impatient.problem == stopped.problem == f"{directory.path} is in use by another process."
        threading.Timer(0.5, lambda: lock.release(force=True)).start()
        assert train_one(spec, store, lambda: False, patience=60).problem == ""
    assert directory.record.exists()
