"""TensorBoard's event files, fed from the curves: `crmatch train ... --tensorboard`. `metrics.jsonl` stays the truth."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from crmatch.errors import DataError, RequestError
from crmatch.runs.directory import RunDirectory

if TYPE_CHECKING:
    from crmatch.runs.experiment import Progress

TAGS = {
    "mask_rate": "train/mask_rate",
    "learning_rate": "train/learning_rate",
    "pseudo_label_error": "pl/error_all",
    "contributing_error": "pl/error_used",
    "error/ema": "eval/error_ema",
    "error/raw": "eval/error_raw",
    "images_per_second": "sys/images_per_second",
    "seconds": "sys/seconds",
}
"""Curve -> tag; `loss/NAME` becomes `train/loss_NAME`, `monitor/NAME` becomes `train/NAME`."""


class EventFile:
    """The curves of one run in `RUN/tensorboard/`, written while it trains.

    A run that continues writes what it had before anew from its curves, into a new file in place of the old ones. So no point
    is there twice and none is missing, however the run ended, and whether it wrote events then or not. A run that was finished
    already gets its events at the end.

    Args:
        directory: the run's.
        beside: who watches the run as well, and is told everything first.
    """

    def __init__(self, directory: RunDirectory, beside: Progress) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            missing = "--tensorboard needs TensorBoard, which is not installed"
            raise RequestError(f"{missing}.\npip install 'crmatch[tensorboard]'") from error
        self._directory, self._beside = directory, beside
        self._file: BinaryIO | None = None
        self._began = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._file is None and kind is None:
            self._begin(self._directory.read_metrics())
        if self._file is not None:
            with suppress(OSError):  # a full disk was reported when the event was written
                self._file.close()

    def start(self, done: int, total: int) -> None:
        """Begin a file with the curves up to step `done`."""
        self._beside.start(done, total)
        self._begin([line for line in self._directory.read_metrics() if line["step"] <= done])

    def advance(self, done: int) -> None:
        """Steps between the points of the curves leave no event."""
        self._beside.advance(done)

    def log(self, line: Mapping[str, Any]) -> None:
        """One more line of curves."""
        self._beside.log(dict(line))
        self._add(line)

    def _begin(self, lines: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        now, folder = time.time(), self._directory.tensorboard
        self._began = now - (lines[-1]["seconds"] if lines else 0)
        with self._writing():
            folder.mkdir(exist_ok=True)
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._file = (folder / f"events.out.tfevents.{now:.6f}.{socket.gethostname()}").open("wb")
        self._write(Event(wall_time=self._began, file_version="brain.Event:2"))
        # A TensorBoard that is looking forgets the points of the files that are gone.
        self._write(Event(wall_time=self._began, step=0, session_log=SessionLog(status=SessionLog.START)))
        for line in lines:
            self._add(line)

    def _add(self, line: Mapping[str, Any]) -> None:
        """The clock of the events is the time of training, without the time between a stop and its continuation."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line)]
        self._write(Event(wall_time=self._began + line["seconds"], step=line["step"], summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._file is not None
        with self._writing():
            RecordWriter(self._file).write(event.SerializeToString())
            self._file.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"cannot write to {self._directory.tensorboard}: {error.strerror}"
            raise DataError(f"{reason}.\nFree some space; the same command continues.") from error


def scalars(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tag and value of everything in a line of curves that has a value at this step."""
    for key, value in line.items():
        if key == "step" or not isinstance(value, int | float):
            continue
        group, _, name = key.rpartition("/")
        yield TAGS.get(key, f"train/loss_{name}" if group == "loss" else f"train/{name}"), float(value)
