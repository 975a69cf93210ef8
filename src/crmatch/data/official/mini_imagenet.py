"""mini-ImageNet from a directory or zip file of pictures: 100 classes of 600, brought to 84x84.

Either one directory per class, or the pictures and the three lists of Ravi and Larochelle (`train.csv`, `val.csv`,
`test.csv`, each with the columns `filename,label`); the lists win where they are there. All 60,000 pictures form one pool.

500 pictures of each class are for training and 100 for testing (the published code permutes the whole pool once, with the
same seed, which leaves the classes unequal). The split: classes in the order of their names, the pictures of a class in the
order of their file names, for each class in turn `permutation(600)` of one `numpy.random.RandomState(42)`; the first 500
are for training. Rows are ordered by class, then by file name.
"""

from __future__ import annotations

import csv
import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from crmatch.data.images import square
from crmatch.data.official.members import ZipMembers, refused, safe_name
from crmatch.data.packed import Array, Rows
from crmatch.errors import DataError

if TYPE_CHECKING:
    from crmatch.data.official.catalog import SourceSet

SIDE = 84
SEED = 42
LISTS = ("train.csv", "val.csv", "test.csv")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
LARGEST_FILE = 1 << 26
MOST_PIXELS = 50_000_000
NAMED = 5
"""Unreadable pictures that an error names."""
_BROKEN = (
    OSError, EOFError, ValueError, SyntaxError, TypeError, KeyError, IndexError, OverflowError, MemoryError, RuntimeError,
    zlib.error, struct.error, Image.DecompressionBombError,
)  # fmt: skip
Open = Callable[[str], IO[bytes]]


class _Pictures(NamedTuple):
    path: Path
    names: Sequence[str]
    open: Open


def read_mini_imagenet(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """The arrays of a directory or zip file; pictures are decoded while they are written."""
    (path,) = paths
    pictures = _directory(path) if path.is_dir() else _zip(path)
    classes = _classes(pictures)
    parts = {part: entry.counts[part] // entry.classes for part in ("train", "test")}
    pool = sum(parts.values())
    if len(classes) != entry.classes:
        raise refused(path, f"it has pictures of {len(classes)} classes, not {entry.classes}")
    for name, files in classes.items():
        if len(files) != pool:
            raise refused(path, f"class {ascii(name)[:80]} has {len(files)} pictures, not {pool}")
    random = np.random.RandomState(SEED)
    rows: dict[str, list[str]] = {part: [] for part in parts}
    for _, files in sorted(classes.items()):
        order, files = random.permutation(pool), sorted(files)
        rows["train"] += [files[k] for k in sorted(order[: parts["train"]])]
        rows["test"] += [files[k] for k in sorted(order[parts["train"] :])]
    broken: list[str] = []
    arrays: dict[str, Array | Rows] = {"class_names": np.array(sorted(classes))}
    for part, count in parts.items():
        shape = (len(rows[part]), SIDE, SIDE, 3)
        arrays[f"{part}_images"] = Rows(shape, _decoded(pictures, rows[part], broken, report=part == "test"))
        arrays[f"{part}_labels"] = np.repeat(np.arange(entry.classes), count)
    return arrays


def _directory(path: Path) -> _Pictures:
    def fail(error: OSError) -> None:
        raise refused(path, f"it cannot be read: {error.strerror}") from error

    names = []
    for folder, _, files in os.walk(path, onerror=fail):
        names += [(Path(folder) / file).relative_to(path).as_posix() for file in files]
    return _Pictures(path, names, lambda name: open(path / name, "rb"))


def _zip(path: Path) -> _Pictures:
    archive = ZipMembers(path, LARGEST_FILE)
    return _Pictures(path, archive.names, archive.open)


def _classes(pictures: _Pictures) -> dict[str, list[str]]:
    """Pictures by class, from the lists or from the directories they lie in."""
    images = [name for name in pictures.names if name.lower().endswith(ENDINGS) and not Path(name).name.startswith(".")]
    lists = {Path(name).name: name for name in pictures.names if Path(name).name in LISTS}
    classes: dict[str, list[str]] = {}
    if not lists:
        for name in images:
            classes.setdefault(Path(name).parent.name, []).append(name)
        return classes
    if len(lists) < len(LISTS):
        raise refused(pictures.path, f"it has {', '.join(sorted(lists))}, but not all of {', '.join(LISTS)}")
    places = {Path(name).name: name for name in images}
    for name in LISTS:
        for file, label in _rows(pictures, lists[name]):
            if file not in places:
                raise refused(pictures.path, f"{name} names {ascii(file)[:80]}, which is missing or named twice")
            classes.setdefault(label, []).append(places.pop(file))
    return classes


def _rows(pictures: _Pictures, name: str) -> Iterator[tuple[str, str]]:
    try:
        with pictures.open(name) as file:
            rows = list(csv.DictReader(io.StringIO(file.read(LARGEST_FILE).decode())))
        for row in rows:
            yield safe_name(pictures.path, row["filename"]), row["label"]
    except DataError:
        raise
    except (*_BROKEN, csv.Error) as error:
        raise refused(pictures.path, f"{name} is no list with the columns filename,label") from error


def _decoded(pictures: _Pictures, names: Sequence[str], broken: list[str], report: bool) -> Iterator[Array]:
    """Pixels in the order of `names`; with `report`, all pictures found broken so far are named at the end."""

    def decode(name: str) -> Array:
        try:
            with pictures.open(name) as file, Image.open(file, formats=FORMATS) as picture:
                if picture.width * picture.height > MOST_PIXELS:
                    raise ValueError("too many pixels")
                return np.asarray(square(picture.convert("RGB"), SIDE))
        except _BROKEN:
            broken.append(name)
            return np.zeros((SIDE, SIDE, 3), np.uint8)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for start in range(0, len(names), 256):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pixels = np.stack(list(threads.map(decode, names[start : start + 256])))
            yield pixels
    if report and broken:
        some = ", ".join(ascii(name)[1:-1][:80] for name in sorted(broken)[:NAMED])
        more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
        raise refused(pictures.path, f"it has pictures that cannot be read, {len(broken)} in number: {some}{more}")
