"""What people see: progress with time left, tables, results in plain words. Rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from crmatch.methods import METHODS
from crmatch.runs.cost import duration

if TYPE_CHECKING:
    from crmatch.evaluation import Quality
    from crmatch.runs.record import RunRecord
    from crmatch.spec.run_spec import RunSpec

TIMED_STEPS = 5
"""Steps after which the length of the run is estimated; the first one is not counted."""


class Display:
    """Shows one run while it trains: a bar on a terminal, a line per evaluation elsewhere, nothing when quiet."""

    def __init__(self, spec: RunSpec, quiet: bool = False) -> None:
        self._spec = spec
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._first = self._total = 0
        self._began = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress:
            self._progress.stop()

    def start(self, done: int, total: int) -> None:
        """Say what trains; begin the bar."""
        self._first, self._total = done, total
        if self._quiet:
            return
        spec = self._spec
        after = f", continuing after step {done:,}" if done else ""
        run = f"recipe {spec.recipe}, split {spec.split}, seed {spec.seed}"
        self._say(f"{METHODS[spec.method.name].title} on {spec.setting}, {run}: {total:,} steps{after}")
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self._progress = Progress(*columns, *times, console=self._console)
            self._progress.add_task(spec.method.name, total=total, completed=done)
            self._progress.start()

    def advance(self, done: int) -> None:
        """Move the bar; after a few steps say how long the run will take."""
        if self._quiet:
            return
        if done == self._first + 1:
            self._began = time.perf_counter()
        elif done == self._first + 1 + TIMED_STEPS:
            seconds = (time.perf_counter() - self._began) / TIMED_STEPS
            self._say(f"{seconds:.2g} s per step: about {duration(seconds * (self._total - done))} for the rest")
        if self._progress:
            self._progress.update(self._progress.task_ids[0], completed=done)

    def log(self, line: Mapping[str, Any]) -> None:
        """Show errors after an evaluation."""
        if self._quiet or "loss/total" not in line:
            return
        error, mask = line.get("error/ema"), line.get("mask_rate")
        parts = [f"loss {line['loss/total']:.3f}"]
        parts += [f"test error {error:.2f} %"] if error is not None else []
        parts += [f"{mask:.0f} % of pseudo-labels used"] if mask is not None else []
        text = ", ".join(parts)
        if self._progress:
            if error is not None:
                self._progress.update(self._progress.task_ids[0], description=f"{self._spec.method.name} {error:.2f} %")
        elif error is not None or line["step"] == self._total:
            self._say(f"step {line['step']:,} of {self._total:,}: {text}, {line['images_per_second']:,.0f} images/s")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)


class _Bar:
    """A bar of rich on a terminal, nothing elsewhere."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._shows = self._console.is_terminal and not quiet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the bar."""
        if self._bar:
            self._bar.stop()
            self._bar = None


class ByteProgress(_Bar):
    """Progress of downloads, hashes and conversions, in bytes."""

    def start(self, total: int | None, already: int, label: str) -> None:
        """Something of `total` bytes begins, of which `already` are done."""
        self.stop()
        if self._shows:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=self._console)
            self._bar.add_task(label, total=total, completed=already)
            self._bar.start()

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        if self._bar:
            self._bar.advance(self._bar.task_ids[0], count)


class PictureProgress(_Bar):
    """Progress of decoding pictures."""

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` pictures are decoded."""
        if self._shows and self._bar is None:
            columns = (TextColumn("reading pictures"), BarColumn(), MofNCompleteColumn(), TextColumn("left"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._bar.add_task("", total=total)
            self._bar.start()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done)


def print_records(records: Sequence[RunRecord], directories: Sequence[Path]) -> None:
    """The end of `crmatch train`: errors, what they were measured on, and where everything lies."""
    console = Console(highlight=False)
    first = records[0]
    setting = f"{first.spec.setting}, split {first.spec.split}, {first.labeled_images:,} labels"
    for record in records:
        title = METHODS[record.spec.method.name].title
        if record.error is None:
            console.print(f"{title} on {setting}: trained; there is no test set to measure it on", soft_wrap=True)
            continue
        rule = "median of the last 20 evaluations" if record.spec.headline == "median_last_20" else "final model"
        console.print(
            f"{title} on {setting}: test error {record.error:.2f} % "
            f"({record.test_images:,} images, {rule}, {duration(record.seconds)} of training)",
            soft_wrap=True,
        )
    if len(records) > 1 and first.error is not None and records[1].error is not None:
        gained = records[1].error - first.error
        words = f"lowers the error by {gained:.2f}" if gained >= 0 else f"raises the error by {-gained:.2f}"
        console.print(f"Using the {first.unlabeled_images:,} unlabeled images {words} percent points.", soft_wrap=True)
    for directory in directories:
        console.print(f"Everything about it: {directory}", soft_wrap=True)


def print_evaluation(run: Path, record: RunRecord, quality: Quality, images: int) -> None:
    """The end of `crmatch evaluate`."""
    print_table(
        [
            {"class": name, "images": sum(row), "error %": "-" if error is None else f"{error:.2f}"}
            for name, row, error in zip(record.class_names, quality.confusion, quality.per_class, strict=True)
        ]
    )
    console = Console(highlight=False)
    console.print(
        f"{run}: test error {quality.error:.2f} % on {images:,} images of {record.spec.setting}, "
        f"calibration error {quality.calibration_error:.2f} points",
        soft_wrap=True,
    )


def print_wide(content: Any) -> None:
    """Print for rich; where no terminal says how wide it is, wide enough for tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(content)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with the same keys as a table."""
    table = Table(*(rows[0] if rows else ()), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(str(value).replace("[", "\\[") for value in row.values()))
    print_wide(table)
