"""Prediction of picture files: worker processes decode the next pictures while the network computes."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from crmatch.data.folder.scan import find_pictures
from crmatch.data.folder.workers import Progress, decode_rows
from crmatch.data.spreadsheet import csv_text
from crmatch.errors import RequestError
from crmatch.predict.model import Model

BATCH = 256
SLAB = 1 << 16
"""Number of pictures whose decoded pixels are kept in a temporary file at the same time."""


class Predictions(NamedTuple):
    """Predictions for N picture files, in the order in which they were given."""

    paths: list[Path]
    class_names: tuple[str, ...]
    probabilities: NDArray[np.float32]  # (N, K), zeros for unreadable files
    unreadable: dict[int, str]  # the reason by row

    def rows(self, abstain: float = 0.0, probabilities: bool = False) -> Iterator[dict[str, Any]]:
        """One dict per picture: path, class, confidence, problem, and on request all probabilities.

        The class is empty for a confidence below `abstain` and for an unreadable file.
        """
        for row, path in enumerate(self.paths):
            values = self.probabilities[row].tolist()
            readable, confidence = row not in self.unreadable, max(values)
            line: dict[str, Any] = {
                "path": str(path),
                "class": self.class_names[values.index(confidence)] if readable and confidence >= abstain else "",
                "confidence": round(confidence, 6) if readable else "",
                "problem": self.unreadable.get(row, ""),
            }
            if probabilities:
                shown = [round(value, 6) if readable else "" for value in values]
                line |= {f"p({name})": value for name, value in zip(self.class_names, shown, strict=True)}
            yield line

    def text(self, form: Literal["csv", "json"], abstain: float = 0.0, probabilities: bool = False) -> str:
        """CSV with a header and one line per picture, or one JSON object with the classes and one object per picture."""
        rows = list(self.rows(abstain, probabilities))
        if form == "json":
            return json.dumps({"classes": list(self.class_names), "predictions": rows}, indent=1) + "\n"
        return csv_text(rows)


def list_pictures(places: Sequence[Path]) -> list[Path]:
    """The given files, whatever their extension, and all picture files below the given folders."""
    found: list[Path] = []
    for place in places:
        inside = find_pictures(place) if place.is_dir() else [place] if place.exists() else []
        if not inside:
            missing = "picture in" if place.is_dir() else "file or folder"
            raise RequestError(f"there is no {missing} {place}.\nName picture files, or folders that hold some.")
        found += inside
    return found


def predict_files(
    model: Model, paths: Sequence[Path], batch_size: int = BATCH, progress: Progress | None = None
) -> Predictions:
    """Predict picture files; a batch consists of consecutive pictures, so the result does not depend on timing."""
    probabilities = np.zeros((len(paths), len(model.class_names)), np.float32)
    unreadable: dict[int, str] = {}
    for first in range(0, len(paths), SLAB):
        slab = paths[first : first + SLAB]
        for rows, pixels, broken in _decoded_batches(slab, model.image_size, model.channels, batch_size):
            unreadable |= {first + row: reason for row, reason in broken.items()}
            if good := [row for row in rows if row not in broken]:
                images = torch.from_numpy(pixels[good]).permute(0, 3, 1, 2)
                probabilities[np.array(good) + first] = model.predict_probabilities(images).float().numpy()
            if progress:
                progress(first + rows.stop, len(paths))
    return Predictions(list(paths), model.class_names, probabilities, unreadable)


def _decoded_batches(
    paths: Sequence[Path], size: int, channels: int, batch_size: int
) -> Iterator[tuple[range, NDArray[np.uint8], dict[int, str]]]:
    """(rows of a batch, pixels of all rows, reasons of its unreadable files) in order; decoding goes on between batches."""
    broken: dict[int, str] = {}
    missing = set(range(len(paths)))
    with tempfile.NamedTemporaryFile(prefix="crmatch-") as file:
        file.truncate(len(paths) * size * size * channels)
        pixels = np.memmap(file.name, np.uint8, "r", shape=(len(paths), size, size, channels))
        jobs = [(row, str(path)) for row, path in enumerate(paths)]
        with contextlib.closing(decode_rows(jobs, Path(file.name), size, channels)) as parts:
            for start in range(0, len(paths), batch_size):
                batch = range(start, min(start + batch_size, len(paths)))
                while not missing.isdisjoint(batch):
                    part = next(parts)
                    missing -= {row for row, _ in part}
                    broken |= {row: what for row, what in part if isinstance(what, str)}
                yield batch, pixels, {row: broken[row] for row in batch if row in broken}
