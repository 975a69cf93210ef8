"""Progress of the runs of a table, read from their directories, so that it does not matter which process trains them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from crmatch.engines.local import RunOutcome
from crmatch.paper.grid import Grid
from crmatch.runs.cost import estimate
from crmatch.runs.directory import RunDirectory, run_directory
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec

LAST_BYTES = 65_536
"""The last line of the curves is looked for in this many bytes at their end."""


class TableProgress(Progress):
    """The missing runs of a table: a row for each run on a terminal, elsewhere a line for each run that ends.

    Args:
        grid: the table.
        missing: its runs that will be trained.
        workspace: where they are kept.
        live: show rows on a terminal; False if each run has a progress bar of its own.
    """

    def __init__(self, grid: Grid, missing: Sequence[RunSpec], workspace: Workspace, live: bool) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        place, state = (TextColumn(f"{{task.{text}}}", markup=False) for text in ("description", "fields[state]"))
        # Curves may get a line only every few minutes, so the time left is estimated over a day instead of rich's 30 seconds.
        options: dict[str, Any] = {"refresh_per_second": 2, "speed_estimate_period": 86_400.0}
        self._shown = live and console.is_terminal
        super().__init__(place, BarColumn(), state, TimeRemainingColumn(), console=console, disable=not self._shown, **options)
        self._grid, self._count, self._done = grid, len(grid.specs), len(grid.specs) - len(missing)
        self._rows: dict[RunSpec, TaskID] = {}
        self._training: dict[RunSpec, tuple[RunDirectory, object]] = {}
        for spec in missing:
            setting = grid.settings[spec.setting]
            directory = run_directory(workspace.out, spec, setting)
            self._rows[spec] = self.add_task(grid.place(spec), total=estimate(spec, setting).steps, state="waiting")
            self._training[spec] = directory, _modified(directory.metrics)
        console.print(f"{grid.title}: {self._done} of {self._count} runs are finished", soft_wrap=True)

    def ended(self, run: RunOutcome) -> None:
        """A run has its record, or will not have one."""
        directory, _ = self._training[run.spec]
        record = None if run.problem else directory.read_record()
        error = "" if record is None or record.error is None else f", test error {record.error:.2f} %"
        with self._lock:  # rich draws in another thread
            self._done += 1
            del self._training[run.spec]
            row = self._rows[run.spec]
            if run.problem:
                self.update(row, state=f"failed: {run.problem}")
            else:
                self.update(row, state=f"finished{error}", completed=self.tasks[row].total)
        if not self._shown:
            text = run.problem or f"finished{error}"
            self.console.print(f"{self._done} of {self._count}: {self._grid.place(run.spec)}: {text}", soft_wrap=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        """What rich draws: a line of counts and the rows; if the terminal is too low for all, only running and failed ones."""
        with self._lock:
            for spec, (directory, before) in list(self._training.items()):
                # A run rewrites its curves when it starts or resumes: as long as the file is unchanged, it is waiting.
                if (now := _modified(directory.metrics)) != before:
                    self._training[spec] = directory, now
                    step, total = _last_step(directory.metrics), self.tasks[self._rows[spec]].total
                    of = f" of {total:,.0f}" if total else ""
                    self.update(self._rows[spec], completed=step, state=f"running, step {step:,}{of}")
        states = [task.fields["state"] for task in self.tasks]
        running, waiting = (sum(state.startswith(word) for state in states) for word in ("running", "waiting"))
        yield Text(f"{self._done} of {self._count} runs ended, {running} running, {waiting} waiting")
        hidden = ("finished", "waiting") if len(states) + 3 > self.console.height else ()
        yield self.make_tasks_table([task for task in self.tasks if not task.fields["state"].startswith(hidden)])


def _modified(path: Path) -> tuple[int, int] | None:
    try:
        return path.stat().st_mtime_ns, path.stat().st_size
    except OSError:
        return None


def _last_step(path: Path) -> int:
    """The step of the last whole line; 0 if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - LAST_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    except (OSError, IndexError, ValueError, TypeError, KeyError):
        return 0
