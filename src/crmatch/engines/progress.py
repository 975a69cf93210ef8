"""How far the runs of a table are, read from the run directories, so that it does not matter which process trains them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crmatch.engines.local import RunOutcome
from crmatch.paper.grid import Grid
from crmatch.runs.cost import duration, estimate
from crmatch.runs.directory import RunDirectory, run_directory
from crmatch.spec.run_spec import RunSpec

LAST_BYTES = 65_536
"""The last line of the curves is found in as many bytes of their end."""
REFRESH_PER_SECOND = 2


class TableProgress:
    """The missing runs of a table: one live table on a terminal, elsewhere a line for each run that ends.

    Args:
        grid: the table.
        missing: its runs that will be trained.
        out: where runs are kept.
        live: whether to show a live table on a terminal; False where each run has a bar of its own.
    """

    def __init__(self, grid: Grid, missing: Sequence[RunSpec], out: Path, live: bool) -> None:
        self._grid, self._out = grid, out
        self._total, self._done = len(grid.specs), len(grid.specs) - len(missing)
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._console.print(f"{grid.title}: {self._done} of {self._total} runs are finished", soft_wrap=True)
        self._ended: dict[RunSpec, str] = {}
        self._live: Live | None = None
        if live and self._console.is_terminal:
            settings = grid.settings
            self._watches = {
                spec: RunWatch(self._directory(spec), estimate(spec, settings[spec.setting]).steps) for spec in missing
            }
            self._live = Live(console=self._console, refresh_per_second=REFRESH_PER_SECOND, get_renderable=self.render)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def ended(self, run: RunOutcome) -> None:
        """One more run has its record, or will not have one."""
        self._done += 1
        self._ended[run.spec] = f"failed: {run.problem}" if run.problem else f"finished{self._error(run.spec)}"
        if not self._live:
            text = run.problem or self._ended[run.spec]
            self._console.print(f"{self._done} of {self._total}: {self._grid.place(run.spec)}: {text}", soft_wrap=True)

    def render(self) -> Table:
        """The live table; where the terminal is too low for all runs, those that wait or are finished are only counted."""
        rows: list[tuple[str, str]] = []
        running = 0
        small = len(self._watches) + 3 > self._console.height
        for spec, watch in self._watches.items():
            state = self._ended.get(spec)
            if state is None:
                state = watch.look().text()
                running += state != "waiting"
            if not small or not state.startswith(("finished", "waiting")):
                rows.append((self._grid.place(spec), state))
        waiting = len(self._watches) - len(self._ended) - running
        table = Table(box=None, pad_edge=False, show_header=False, title_justify="left", title_style="")
        table.title = Text(f"{self._done} of {self._total} runs ended, {running} running, {waiting} waiting")
        for place, state in rows:
            table.add_row(Text(place), Text(state))
        return table

    def _directory(self, spec: RunSpec) -> RunDirectory:
        return run_directory(self._out, spec, self._grid.settings[spec.setting])

    def _error(self, spec: RunSpec) -> str:
        record = self._directory(spec).read_record()
        return "" if record is None or record.error is None else f", test error {record.error:.2f} %"


class Seen(NamedTuple):
    """How far a run is; `step` is None where it did not begin since the command did."""

    step: int | None = None
    total: int | None = None
    seconds_left: float | None = None

    def text(self) -> str:
        """In words."""
        if self.step is None:
            return "waiting"
        of = f" of {self.total:,}" if self.total else ""
        left = f", {duration(self.seconds_left)} left" if self.seconds_left is not None else ""
        return f"running, step {self.step:,}{of}{left}"


class RunWatch:
    """Follows a run that another process trains, maybe on another machine: its curves are written anew when it begins.

    Args:
        directory: where the run lives.
        total: its length in steps, where that is known.
    """

    def __init__(self, directory: RunDirectory, total: int | None) -> None:
        self._path, self._total = directory.metrics, total
        self._state = self._file_state()
        self._seen = Seen()
        self._first = (0.0, 0)

    def look(self) -> Seen:
        """How far the run is now. The time left follows from the pace since the first look, or since it was set back."""
        state = self._file_state()
        if state == self._state:
            return self._seen
        self._state = state
        now, step, before = time.monotonic(), self._last_step(), self._seen.step
        if before is None or step < before:
            self._first = (now, step)
        (began, first), left = self._first, None
        if self._total and step > first:
            left = (now - began) / (step - first) * (self._total - step)
        self._seen = Seen(step, self._total, left)
        return self._seen

    def _file_state(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def _last_step(self) -> int:
        """The step of the last whole line, 0 where there is none."""
        try:
            with open(self._path, "rb") as file:
                file.seek(max(0, file.seek(0, 2) - LAST_BYTES))
                lines = file.read().split(b"\n")[:-1]
            return int(json.loads(lines[-1])["step"])
        except (OSError, IndexError, ValueError, TypeError, KeyError):
            return 0
