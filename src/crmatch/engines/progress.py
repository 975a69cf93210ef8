"""Progress of the runs of a table, read from their directories, so that it does not matter which process trains them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from crmatch.engines.local import RunOutcome
from crmatch.paper.grid import Grid
from crmatch.runs.cost import estimate
from crmatch.runs.directory import RunDirectory, run_directory
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec


class TableProgress:
    """The missing runs of a table: a row for each run on a terminal, elsewhere a line for each run that ends.

    With `live` False there are no rows, because each run has a progress bar of its own.
    """

    def __init__(self, grid: Grid, missing: Sequence[RunSpec], workspace: Workspace, live: bool) -> None:
        self._grid, self._count, self._done = grid, len(grid.specs), len(grid.specs) - len(missing)
        self._console = Console(stderr=True, highlight=False, markup=False)
        place, state = (TextColumn(f"{{task.{text}}}", markup=False) for text in ("description", "fields[state]"))
        # Curves may get a line only every few minutes, so the time left is estimated over a day instead of rich's 30 seconds.
        columns = (place, BarColumn(), state, TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, speed_estimate_period=86_400.0)
        self._rows: dict[RunSpec, TaskID] = {}
        self._training: dict[RunSpec, tuple[RunDirectory, object]] = {}
        for spec in missing:
            setting = grid.settings[spec.setting]
            directory = run_directory(workspace.out, spec, setting)
            self._rows[spec] = self._bars.add_task(grid.place(spec), total=estimate(spec, setting).steps, state="waiting")
            self._training[spec] = directory, _modified(directory.metrics)
        self._console.print(f"{grid.title}: {self._done} of {self._count} runs are finished", soft_wrap=True)
        self._lock = RLock()  # rich draws in another thread
        self._live: Live | None = None
        if live and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=2, get_renderable=self.render)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def ended(self, run: RunOutcome) -> None:
        """A run has its record, or will not have one."""
        directory, row = self._training[run.spec][0], self._rows[run.spec]
        record = None if run.problem else directory.read_record()
        error = "" if record is None or record.error is None else f", test error {record.error:.2f} %"
        state = f"failed: {run.problem}" if run.problem else f"finished{error}"
        with self._lock:
            self._done += 1
            del self._training[run.spec]
            self._bars.update(row, state=state, completed=None if run.problem else self._bars.tasks[row].total)
        if not self._live:
            self._console.print(f"{self._done} of {self._count}: {self._grid.place(run.spec)}: {state}", soft_wrap=True)

    def render(self) -> Group:
        """A line of counts and the rows; if the terminal is too low for all rows, only the running and failed ones."""
        with self._lock:
            for spec, (directory, before) in list(self._training.items()):
                # A run rewrites its curves when it starts or resumes: as long as the file is unchanged, it is waiting.
                if (now := _modified(directory.metrics)) != before:
                    self._training[spec] = directory, now
                    step, total = _last_step(directory.metrics), self._bars.tasks[self._rows[spec]].total
                    of = f" of {total:,.0f}" if total else ""
                    self._bars.update(self._rows[spec], completed=step, state=f"running, step {step:,}{of}")
            tasks = self._bars.tasks
            running, waiting = (sum(task.fields["state"].startswith(word) for task in tasks) for word in ("running", "waiting"))
            if len(tasks) + 3 > self._console.height:
                tasks = [task for task in tasks if not task.fields["state"].startswith(("finished", "waiting"))]
            counts = f"{self._done} of {self._count} runs ended, {running} running, {waiting} waiting"
            return Group(Text(counts), self._bars.make_tasks_table(tasks))


def _modified(path: Path) -> tuple[int, int] | None:
    try:
        return path.stat().st_mtime_ns, path.stat().st_size
    except OSError:
        return None


def _last_step(path: Path) -> int:
    """The step of the last whole line; 0 if there is none."""
    try:
        return int(json.loads(path.read_bytes().split(b"\n")[-2])["step"])
    except (OSError, IndexError, ValueError, TypeError, KeyError):
        return 0
