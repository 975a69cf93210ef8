"""What is shown while a command works and when it ends: progress bars on a terminal, plain lines elsewhere, results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from crmatch.errors import printable
from crmatch.methods import title_of
from crmatch.runs.cost import duration, feature_seconds, on_cpu
from crmatch.runs.record import HEADLINES, describe_error

if TYPE_CHECKING:
    from crmatch.evaluation import Quality
    from crmatch.runs.calibration import Calibration
    from crmatch.runs.record import RunRecord
    from crmatch.spec.run_spec import RunSpec

TIMED_STEPS, TIMED_SECONDS = 5, 10.0
"""The duration of a run is estimated from this many steps after the first one, which is slower, or from fewer slow ones."""


class Bar(AbstractContextManager["Bar"]):
    """A progress bar on an interactive terminal, in units such as `bytes` or `steps`; nothing elsewhere or if `quiet`."""

    def __init__(self, unit: str, quiet: bool = False, label: str = "reading") -> None:
        self.console = Console(stderr=True, highlight=False, markup=False)
        self.visible = self.console.is_interactive and not quiet
        self._unit, self._label = unit, label
        self._progress: bars.Progress | None = None

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` are done; the first call starts the bar."""
        if self._progress is None:
            self.start(total, 0, self._label)
        self.update(completed=done)

    def start(self, total: float | None, already: float, label: str, counted: str | None = None) -> None:
        """Start a bar, of which `already` is done; an earlier one ends. With `counted`, this text replaces the counts."""
        self.stop()
        if self.visible:
            count = bars.MofNCompleteColumn() if counted is None else bars.TextColumn("{task.fields[counted]}")
            counts: list[str | bars.ProgressColumn] = [count, self._unit]
            if self._unit == "bytes":
                counts = [bars.DownloadColumn(), bars.TransferSpeedColumn()]
            times = (bars.TimeElapsedColumn(), "left", bars.TimeRemainingColumn())
            self._progress = bars.Progress("{task.description}", bars.BarColumn(), *counts, *times, console=self.console)
            self._progress.add_task(escape(label), total=total, completed=round(already), counted=counted)
            self._progress.start()

    def advance(self, count: int) -> None:
        """`count` more are done."""
        self.update(advance=count)

    def update(self, **values: Any) -> None:
        """Change values of rich's task: `completed`, `advance`, `description`, `counted`."""
        if self._progress:
            self._progress.update(self._progress.task_ids[0], **values)

    def stop(self) -> None:
        """End the bar; it stays on the screen."""
        if self._progress:
            self._progress.stop()
            self._progress = None


class Display(AbstractContextManager["Display"]):
    """Shows one run while it trains: a bar on a terminal, a line per evaluation elsewhere, nothing if `quiet`.

    If `brief`, it only says how long the run will take.
    """

    def __init__(self, spec: RunSpec, quiet: bool = False, brief: bool = False) -> None:
        self._spec, self._quiet, self._brief = spec, quiet, brief
        self.cost = ""  # of the run, in words
        self._bar = Bar("steps", quiet or brief)
        self._features: Bar | None = None
        self._first = self._total = 0
        self._began: float | None = None  # when the steps that are timed began

    def __exit__(self, *exception: object) -> None:
        self._end_features()
        self._bar.stop()

    def _end_features(self) -> None:
        if self._features is not None:
            self._features.stop()
            self._features = None

    def features(self, done: int, total: int) -> None:
        """Show how many features of a frozen backbone are computed."""
        if self._features is None:
            self._features = Bar("views", self._quiet or self._brief)
            seconds, size = feature_seconds(self._spec, total), self._spec.data.image_size
            time_needed = f", about {duration(max(1, seconds))} {on_cpu()}" if seconds else ""
            self._say(f"The pretrained network computes features of {total:,} views at {size} px (once{time_needed})")
            self._features.start(total, 0, "computing features")
            self._began, self._first = time.perf_counter(), done
        elif self._brief and self._began is not None:
            seconds = (time.perf_counter() - self._began) / (done - self._first)
            self._say(f"computing features takes about {duration(max(1, seconds * (total - done)))}", brief=True)
            self._began = None
        self._features.update(completed=done)

    def start(self, done: int, total: int) -> None:
        """Say what is trained, and begin the bar."""
        self._end_features()
        self._first, self._total = done, total
        spec = self._spec
        run = f"{title_of(spec.method)} on {spec.setting}, recipe {spec.recipe}, split {spec.split}, seed {spec.seed}"
        self._say(f"{run}: {self.cost or f'{total:,} steps'}" + (f", resuming after step {done:,}" if done else ""))
        self._bar.start(self._work(total), self._work(done), spec.method.name, self._counted(done))

    def advance(self, done: int) -> None:
        """Move the bar; after a few steps say how long the run will take."""
        now, timed = time.perf_counter(), done - self._first - 1
        if timed == 0:
            self._began = now
        elif self._began is not None and (timed >= TIMED_STEPS or now - self._began > TIMED_SECONDS):
            seconds, worked = now - self._began, self._work(done) - self._work(self._first + 1)
            rest = duration(max(1, seconds / worked * (self._work(self._total) - self._work(done))))
            run = f"{self._spec.method.name}: {self._total:,} steps, about {rest}"
            speed = f"{seconds / timed:.2g} s per step" + " at first" * (done < self._spec.plan.start_steps(self._total))
            self._say(run if self._brief else f"{speed}: about {rest} for the rest", brief=True)
            self._began = None
        self._bar.update(completed=self._work(done), counted=self._counted(done))

    def _work(self, steps: int) -> float:
        """The time of so many steps, in steps with images of the full size; smaller ones take time in proportion to pixels."""
        plan = self._spec.plan
        if plan.start_size is None:
            return steps
        small = min(steps, plan.start_steps(self._total))
        return small * (plan.start_size / self._spec.data.image_size) ** 2 + steps - small

    def _counted(self, done: int) -> str:
        return f"{done:,}/{self._total:,}"

    def log(self, line: Mapping[str, Any]) -> None:
        """Show loss and test error after an evaluation and at the end."""
        error, mask = line.get("error/ema"), line.get("mask_rate")
        if error is not None:
            self._bar.update(description=f"{self._spec.method.name} {error:.2f} %")
        if self._bar.visible or "loss/total" not in line or (error is None and line["step"] != self._total):
            return
        parts = [f"loss {line['loss/total']:.3f}"]
        parts += [f"test error {error:.2f} %"] if error is not None else []
        parts += [f"{mask:.0f} % of pseudo-labels used"] if mask is not None else []
        speed = f"{line['images_per_second']:,.0f} images/s"
        self._say(f"step {line['step']:,} of {self._total:,}: {', '.join([*parts, speed])}")

    def _say(self, text: str, brief: bool = False) -> None:
        if not self._quiet and (brief or not self._brief):
            self._bar.console.print(text, soft_wrap=True)


def print_records(records: Sequence[RunRecord], directories: Sequence[Path], before: RunRecord | None = None) -> None:
    """The result of `crmatch train`: test errors, the gains over the baseline and the round before, and the directories."""
    first, *others = records
    setting = f"{first.spec.setting}, split {first.spec.split}, {first.labeled_images:,} labels"
    for record in records:
        title = title_of(record.spec.method)
        if record.error is None:
            result = "trained; there is no test set to measure it on"
            if (estimate := record.cross_validation) is not None:
                result = f"estimated error {describe_error(estimate.error, estimate.labels)}, by cross-validation over "
                result += f"{estimate.labels:,} labels; there is no test set to measure it on"
        else:
            details = (
                f"{record.test_images:,} images, {HEADLINES[record.spec.headline]}, {duration(record.seconds)} of training"
            )
            result = f"test error {describe_error(record.error, record.test_images)} ({details})"
        typer.echo(f"{title} on {setting}: {result}")
    if others and first.error is not None and others[0].error is not None:
        gain = others[0].error - first.error
        change = f"{'lowers' if gain >= 0 else 'raises'} the error by {abs(gain):.2f} percentage points"
        how = "Tuning with" if first.spec.recipe == "tune" else "Using"
        typer.echo(f"{how} the {first.unlabeled_images:,} unlabeled images {change}.")
        if gain < 0 and first.spec.recipe == "quick":
            typer.echo(f"Unlabeled images usually help after more steps than the {first.steps:,} of this run (--steps).")
    if before:
        more = first.labeled_images - before.labeled_images
        labels = f"{abs(more):,} {'more' if more >= 0 else 'fewer'} label{'s' * (abs(more) != 1)}"
        if first.error is None or before.error is None:
            typer.echo(f"{labels} than before; without test pictures the errors cannot be compared.")
        else:
            other = "" if first.test_images == before.test_images else ", on another test set"
            typer.echo(f"Before {before.error:.1f} %, now {first.error:.1f} %, {labels}{other}.")
    for directory in directories:
        typer.echo(f"Saved in {directory}")


def print_evaluation(run: Path, record: RunRecord, quality: Quality, calibration: Calibration | None) -> None:
    """The result of `crmatch evaluate`."""
    images, fitted = sum(map(sum, quality.confusion)), calibration and calibration.fitted_on == "test"
    print_table(
        [
            {"class": name, "images": sum(row), "error %": "-" if error is None else f"{error:.2f}"}
            for name, row, error in zip(record.class_names, quality.confusion, quality.per_class, strict=True)
        ]
    )
    typer.echo(
        f"{run}: test error {describe_error(quality.error, images)} on {images:,} images of {record.spec.setting}, "
        f"calibration error {quality.calibration_error:.2f} percentage points"
        + " (its temperature was fitted on the same images)"
        * bool(fitted)
    )


def print_wide(content: Any) -> None:
    """Print with rich; 200 columns wide if the output is not a terminal, so that tables are not cut."""
    Console(highlight=False, width=None if Console().is_terminal else 200).print(content)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with the same keys as a table."""
    table = Table(*(rows[0] if rows else ()), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(printable(str(value))) for value in row.values()))
    print_wide(table)
