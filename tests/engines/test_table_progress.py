"""What a table shows of its runs, read from their directories alone."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from crmatch.engines import progress as module
from crmatch.engines.local import RunOutcome
from crmatch.engines.progress import TableProgress
from crmatch.paper.grid import Overrides, find_table, make_grid
from crmatch.runs.workspace import Workspace

GRID = make_grid(find_table("ablation"), Overrides(setting="digits@4", steps=50))
SPECS = GRID.specs


def write_steps(workspace: Workspace, run: int, *steps: int, cut: str = "") -> None:
    """Curves up to a step; the file's time moves on even if the clock of the disk is coarse."""
    directory = workspace.run_directory(SPECS[run])
    directory.path.mkdir(parents=True, exist_ok=True)
    before = directory.metrics.stat().st_mtime_ns if directory.metrics.exists() else 0
    directory.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + cut)
    os.utime(directory.metrics, ns=(before + 10**9, before + 10**9))


def on_terminal(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, height: int = 40, clock: Callable[[], float] | None = None
) -> TableProgress:
    def terminal(**options: object) -> Console:
        return Console(file=io.StringIO(), force_terminal=True, width=200, height=height, get_time=clock)

    monkeypatch.setattr(module, "Console", terminal)
    return TableProgress(GRID, SPECS, workspace, live=True)


def shown(progress: TableProgress) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(progress.render())
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.replace("━", "").split()) for line in console.file.getvalue().splitlines()]


def test_a_run_waits_until_its_curves_change_and_then_shows_step_and_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, now = Workspace.at(tmp_path), [100.0]
    write_steps(workspace, 0, 10, 20)
    progress = on_terminal(workspace, monkeypatch, clock=lambda: now[0])
    row = lambda: shown(progress)[1].removeprefix(GRID.place(SPECS[0])).strip()  # noqa: E731
    assert row() == "waiting -:--:--"
    write_steps(workspace, 0, 10, 20)
    assert row() == "running, step 20 of 50 -:--:--"
    now[0] += 5
    write_steps(workspace, 0, 10, 20, 30, cut='{"step": 4')
    assert row() == "running, step 30 of 50 0:00:10"
    write_steps(workspace, 0, 10)  # killed and resumed elsewhere
    assert row().startswith("running, step 10 of 50")


@pytest.mark.parametrize("height", [40, 6])
def test_the_live_table_has_every_run_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    workspace = Workspace.at(tmp_path)
    with on_terminal(workspace, monkeypatch, height) as progress:
        write_steps(workspace, 2, 5)
        progress.ended(RunOutcome(SPECS[0], "diverged: at step 3"))
        progress.ended(RunOutcome(SPECS[1]))
        lines = shown(progress)
    assert lines[0] == "2 of 4 runs ended, 1 running, 1 waiting"
    states = ["failed: diverged: at step 3", "finished", "running, step 5 of 50", "waiting"]
    rows = [f"{GRID.place(spec)} {state}" for spec, state in zip(SPECS, states, strict=True)]
    expected = rows if height == 40 else [rows[0], rows[2]]
    assert len(lines) == 1 + len(expected)
    assert all(line.startswith(row) for line, row in zip(lines[1:], expected, strict=True))
