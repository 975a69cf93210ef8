"""TensorBoard event files: `crmatch train ... --tensorboard` writes a run's curves to `RUN/tensorboard/`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from crmatch.errors import DataError, RequestError
from crmatch.runs.directory import RunDirectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from crmatch.runs.experiment import Progress

TAGS = {
    "pseudo_label_error": "pl/error_all",
    "contributing_error": "pl/error_used",
    "error/ema": "eval/error_ema",
    "error/raw": "eval/error_raw",
    "images_per_second": "sys/images_per_second",
    "seconds": "sys/seconds",
}
"""Curve -> tag; `loss/NAME` becomes `train/loss_NAME`, and any other curve becomes `train/NAME`."""


class EventFile(AbstractContextManager["EventFile"]):
    """Writes the curves of one run while it trains, and passes everything on to another progress display.

    A resumed run replaces its event files by one with all curves of `metrics.jsonl` up to the step it resumes from, so
    that no point is missing or there twice. A run that was finished before gets its events at the end.
    """

    def __init__(self, directory: RunDirectory, beside: Progress) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            missing = "--tensorboard needs TensorBoard, which is not installed"
            raise RequestError(f"{missing}.\npip install 'crmatch[tensorboard]'") from error
        self._directory, self._beside = directory, beside
        self._writer: SummaryWriter | None = None
        self._began = 0.0

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._writer is None and kind is None:
            self._write(self._directory.read_metrics())
        if self._writer is not None:
            with suppress(OSError):  # a full disk was reported when the event was written
                self._writer.close()

    def start(self, done: int, total: int) -> None:
        """Begin a file with the curves up to step `done`."""
        self._beside.start(done, total)
        self._write([line for line in self._directory.read_metrics() if line["step"] <= done])

    def features(self, done: int, total: int) -> None:
        """Pass the number of computed features on."""
        self._beside.features(done, total)

    def advance(self, done: int) -> None:
        """Pass the step on; only log points become events."""
        self._beside.advance(done)

    def log(self, line: dict[str, Any]) -> None:
        """Write one line of curves."""
        self._beside.log(line)
        self._write([line])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        folder = self._directory.tensorboard
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                for old in folder.glob("events.out.tfevents.*"):
                    old.unlink()
                # With purge_step, a TensorBoard that shows this run drops the points of the removed files.
                self._writer = SummaryWriter(str(folder), purge_step=0)
                self._began = time.time() - (lines[-1]["seconds"] if lines else 0)
            for line in lines:
                for tag, value in scalars(line):
                    # Wall time is the time of training; it excludes the time between a stop and its continuation.
                    self._writer.add_scalar(tag, value, line["step"], walltime=self._began + line["seconds"])
            self._writer.flush()
        except OSError as error:
            reason = f"cannot write to {folder}: {error.strerror}"
            raise DataError(f"{reason}.\nFree some space, then run the same command again to resume.") from error


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tag and value of every curve that has a value at this log point."""
    for key, value in line.items():
        if key == "step" or not isinstance(value, int | float):
            continue
        group, _, name = key.rpartition("/")
        yield TAGS.get(key, f"train/loss_{name}" if group == "loss" else f"train/{name}"), float(value)
