"""What a table shows of its runs, read from their directories alone."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from crmatch.engines import progress as table_progress
from crmatch.engines.local import RunOutcome
from crmatch.engines.progress import RunWatch, TableProgress
from crmatch.paper.grid import Grid, Overrides, find_table, make_grid
from crmatch.runs.directory import RunDirectory, run_directory
from crmatch.spec.run_spec import RunSpec


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in its only element."""
    now = [100.0]
    monkeypatch.setattr(table_progress.time, "monotonic", lambda: now[0])
    return now


def write_steps(directory: RunDirectory, *steps: int, cut: str = "") -> None:
    """Curves up to a step; the file's time moves on even where the clock of the disk is coarse."""
    directory.path.mkdir(parents=True, exist_ok=True)
    before = directory.metrics.stat().st_mtime_ns if directory.metrics.exists() else 0
    directory.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + cut)
    os.utime(directory.metrics, ns=(before + 10**9, before + 10**9))


def test_a_run_waits_until_its_curves_change_and_says_its_pace_since(tmp_path: Path, clock: list[float]) -> None:
    directory = RunDirectory(tmp_path / "run")
    write_steps(directory, 10, 20)
    watch = RunWatch(directory, total=100)
    assert watch.look().text() == "waiting"
    write_steps(directory, 10, 20)
    assert watch.look().text() == "running, step 20 of 100"
    clock[0] += 5
    write_steps(directory, 10, 20, 30, cut='{"step": 4')
    assert watch.look().text() == "running, step 30 of 100, 35 s left"
    clock[0] += 60
    assert watch.look().text() == "running, step 30 of 100, 35 s left"
    write_steps(directory, 10)  # killed and continued elsewhere
    assert watch.look().text() == "running, step 10 of 100"
    clock[0] += 2
    write_steps(directory, 10, 20)
    assert watch.look().text() == "running, step 20 of 100, 16 s left"


def test_a_run_of_unknown_length_without_curves_is_running_once_it_has_a_file(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    watch = RunWatch(directory, total=None)
    assert watch.look().text() == "waiting"
    write_steps(directory, cut="half a li")
    assert watch.look().text() == "running, step 0"


def shown(progress: TableProgress) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    console.print(progress.render())
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def on_terminal(grid: Grid, missing: list[RunSpec], out: Path, monkeypatch: pytest.MonkeyPatch, height: int) -> TableProgress:
    def terminal(**options: object) -> Console:
        return Console(file=io.StringIO(), force_terminal=True, width=120, height=height)

    monkeypatch.setattr(table_progress, "Console", terminal)
    return TableProgress(grid, missing, out, live=True)


@pytest.mark.parametrize("height", [40, 6])
def test_the_live_table_has_every_run_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    grid = make_grid(find_table("ablation"), Overrides(setting="digits@4", steps=50))
    specs = grid.specs
    with on_terminal(grid, specs[:], tmp_path, monkeypatch, height) as progress:
        write_steps(run_directory(tmp_path, specs[2], grid.settings["digits@4"]), 5)
        progress.ended(RunOutcome(specs[0], "diverged: at step 3"))
        progress.ended(RunOutcome(specs[1]))
        lines = shown(progress)
    assert lines[0] == "2 of 4 runs ended, 1 running, 1 waiting"
    rows = [
        f"{grid.place(specs[0])} failed: diverged: at step 3",
        f"{grid.place(specs[1])} finished",
        f"{grid.place(specs[2])} running, step 5 of 50",
        f"{grid.place(specs[3])} waiting",
    ]
    assert lines[1:] == (rows if height == 40 else [rows[0], rows[2]])
