"""Prediction of picture files: decoding in worker processes while the network computes."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import queue
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from crmatch.data.folder.scan import find_pictures
from crmatch.data.folder.workers import Progress, decode_rows
from crmatch.errors import RequestError
from crmatch.predict.model import Model

BATCH = 256
SLAB = 1 << 16
"""Pictures whose pixels are on disk at the same time."""
Answers = list[tuple[int, Any]]


class Predictions(NamedTuple):
    """What a model says about picture files.

    Attributes:
        paths: as asked for, in order.
        class_names: of the model.
        probabilities: float32 (N, K), zeros where a picture cannot be read.
        unreadable: reason by row.
    """

    paths: list[Path]
    class_names: tuple[str, ...]
    probabilities: NDArray[np.float32]
    unreadable: dict[int, str]

    def rows(self, abstain: float = 0.0, probabilities: bool = False) -> Iterator[dict[str, Any]]:
        """One dict per picture: path, class (empty below the confidence `abstain`), confidence, problem; all probabilities."""
        best = self.probabilities.argmax(axis=1)
        for row, path in enumerate(self.paths):
            confidence = float(self.probabilities[row, best[row]])
            readable = row not in self.unreadable
            line: dict[str, Any] = {
                "path": str(path),
                "class": self.class_names[best[row]] if readable and confidence >= abstain else "",
                "confidence": round(confidence, 6) if readable else "",
                "problem": self.unreadable.get(row, ""),
            }
            if probabilities:
                values = (
                    [round(value, 6) for value in self.probabilities[row].tolist()]
                    if readable
                    else [""] * len(self.class_names)
                )
                line |= {f"p({name})": value for name, value in zip(self.class_names, values, strict=True)}
            yield line

    def to_csv(self, abstain: float = 0.0, probabilities: bool = False) -> str:
        """A header and one line per picture."""
        rows = list(self.rows(abstain, probabilities))
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def to_json(self, abstain: float = 0.0, probabilities: bool = False) -> str:
        """One object with the classes and one object per picture."""
        rows = list(self.rows(abstain, probabilities))
        return json.dumps({"classes": list(self.class_names), "predictions": rows}, indent=1) + "\n"


def list_pictures(places: Sequence[Path]) -> list[Path]:
    """Picture files from files and folders, folders with all that is below them; a file named itself is always tried."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = find_pictures(place)
            if not inside:
                raise RequestError(f"there is no picture in {place}.\nName picture files, or a folder that holds some.")
            found += inside
        elif place.exists():
            found.append(place)
        else:
            raise RequestError(f"there is no file or folder {place}.\nName picture files, or folders that hold some.")
    return found


def predict_files(
    model: Model, paths: Sequence[Path], batch_size: int = BATCH, progress: Progress | None = None
) -> Predictions:
    """Predict picture files; batches are made of consecutive pictures, so that the result does not depend on timing."""
    probabilities = np.zeros((len(paths), len(model.class_names)), np.float32)
    unreadable: dict[int, str] = {}
    for first in range(0, len(paths), SLAB):
        slab = paths[first : first + SLAB]
        for rows, pixels, broken in _decoded_batches(slab, model.image_size, model.channels, batch_size):
            unreadable |= {first + row: reason for row, reason in broken.items()}
            good = [row for row in rows if row not in broken]
            if good:
                images = torch.from_numpy(pixels[good]).permute(0, 3, 1, 2)
                places = np.array(good) + first
                probabilities[places] = model.predict_probabilities(images).float().numpy()
            if progress:
                progress(first + rows.stop, len(paths))
    return Predictions(list(paths), model.class_names, probabilities, unreadable)


def _decoded_batches(
    paths: Sequence[Path], size: int, channels: int, batch_size: int
) -> Iterator[tuple[range, NDArray[np.uint8], dict[int, str]]]:
    """(rows, pixels of all rows, reasons of the unreadable ones) by batch, in order, decoded ahead in the background."""
    batches = [range(start, min(start + batch_size, len(paths))) for start in range(0, len(paths), batch_size)]
    broken: dict[int, str] = {}
    waiting = np.array([len(batch) for batch in batches])
    with tempfile.NamedTemporaryFile(prefix="crmatch-") as file:
        file.truncate(len(paths) * size * size * channels)
        pixels = np.memmap(file.name, np.uint8, "r", shape=(len(paths), size, size, channels))
        with _background(paths, Path(file.name), size, channels) as answers:
            for number, batch in enumerate(batches):
                while waiting[number]:
                    for row, what in _next(answers):
                        waiting[row // batch_size] -= 1
                        if isinstance(what, str):
                            broken[row] = what
                yield batch, pixels, {row: broken[row] for row in batch if row in broken}


@contextlib.contextmanager
def _background(
    paths: Sequence[Path], target: Path, size: int, channels: int
) -> Iterator[queue.SimpleQueue[Answers | Exception]]:
    """A thread that keeps the decoding processes busy while this one computes; what they found comes by the queue."""
    answers: queue.SimpleQueue[Answers | Exception] = queue.SimpleQueue()
    stop = threading.Event()

    def feed() -> None:
        try:
            with contextlib.closing(
                decode_rows([(row, str(path)) for row, path in enumerate(paths)], target, size, channels)
            ) as found:
                for part in found:
                    answers.put(part)
                    if stop.is_set():
                        return
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            answers.put(error)

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


def _next(answers: queue.SimpleQueue[Answers | Exception]) -> Answers:
    part = answers.get()
    if isinstance(part, Exception):
        raise part
    return part
