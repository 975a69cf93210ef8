"""mini-ImageNet from a user's own directory or zip file of pictures: 100 classes of 600, made square with 84 pixels.

There is either one directory per class, or the three lists of Ravi and Larochelle (`train.csv`, `val.csv`, `test.csv`, each
with the columns `filename,label`), which take precedence. All 60,000 pictures form one pool.

500 pictures of each class are for training and 100 for testing (the published code permutes the whole pool once, with the
same seed, which leaves the classes unequal). The split: classes in the order of their names, the pictures of a class in the
order of their file names, for each class in turn `permutation(600)` of one `numpy.random.RandomState(42)`; the first 500
are for training. Rows are ordered by class, then by file name.

There is no official file and thus no checksum, so nothing in a zip file is trusted: nothing is unpacked to disk, sizes are
limited, and pictures are opened by `open_picture`, which limits formats and pixels.
"""

from __future__ import annotations

import csv
import io
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np

from crmatch.data.folder.decode import EXTENSIONS, open_picture
from crmatch.data.folder.scan import join_names
from crmatch.data.official.catalog import SourceSet
from crmatch.data.packed import Array, Rows
from crmatch.data.square import square
from crmatch.errors import DataError

SIDE = 84
SEED = 42
LISTS = ("train.csv", "val.csv", "test.csv")
LARGEST_FILE = 1 << 26
Read = Callable[[str], io.BytesIO]


def read_mini_imagenet(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """The arrays of a directory or zip file; pictures are decoded while they are written."""
    (path,) = paths
    names, read = _directory(path) if path.is_dir() else _zip(path)
    try:
        classes = _classes(names, read)
    except Exception as error:
        problem = f"{type(error).__name__}: {join_names([str(error)])[:80]}"
        raise _refused(path, f"{', '.join(LISTS)} cannot be read or do not match its pictures ({problem})") from error
    parts = {part: entry.counts[part] // entry.classes for part in ("train", "test")}
    pool = sum(parts.values())
    if len(classes) != entry.classes:
        raise _refused(path, f"it has pictures of {len(classes)} classes, not {entry.classes}")
    if wrong := [name for name, files in classes.items() if len(files) != pool]:
        raise _refused(path, f"class {join_names(wrong[:1])[:80]} has {len(classes[wrong[0]])} pictures, not {pool}")
    random = np.random.RandomState(SEED)
    rows: dict[str, list[str]] = {part: [] for part in parts}
    for _, files in sorted(classes.items()):
        order, files = random.permutation(pool), sorted(files)
        rows["train"] += [files[k] for k in sorted(order[: parts["train"]])]
        rows["test"] += [files[k] for k in sorted(order[parts["train"] :])]
    arrays: dict[str, Array | Rows] = {"class_names": np.array(sorted(classes))}
    broken: list[str] = []

    def images(part: str) -> Iterator[Array]:
        yield from _decoded(rows[part], read, broken)
        if broken and part == "test":  # the last part: now all broken pictures are known
            raise _refused(path, f"{len(broken)} of its pictures cannot be read: {join_names(broken)[:400]}")

    for part, count in parts.items():
        arrays[f"{part}_images"] = Rows((len(rows[part]), SIDE, SIDE, 3), images(part))
        arrays[f"{part}_labels"] = np.repeat(np.arange(entry.classes), count)
    return arrays


def _refused(path: Path, reason: str) -> DataError:
    return DataError(f"{path} cannot be used: {reason}.\nNothing was written. Give another copy with --from PATH.")


def _directory(path: Path) -> tuple[list[str], Read]:
    def read(name: str) -> io.BytesIO:
        with open(path / name, "rb") as file:
            return io.BytesIO(file.read(LARGEST_FILE))

    return [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()], read


def _zip(path: Path) -> tuple[list[str], Read]:
    try:
        archive = zipfile.ZipFile(path)
    except Exception as error:  # zipfile raises many kinds of exceptions on damaged files
        raise _refused(path, f"it is not a zip file or is truncated: {str(error)[:80]}") from error
    for info in archive.infolist():
        if info.filename.startswith("/") or ".." in PurePosixPath(info.filename).parts or "\\" in info.orig_filename:
            raise _refused(path, f"it has a member named {join_names([info.filename])[:80]}")

    def read(name: str) -> io.BytesIO:
        info = archive.getinfo(name)
        if info.file_size > LARGEST_FILE:
            raise ValueError("too large")
        with archive.open(info) as member:
            return io.BytesIO(member.read(info.file_size))  # inflates no more bytes than the directory of the archive says

    return archive.namelist(), read


def _classes(names: Sequence[str], read: Read) -> dict[str, list[str]]:
    """Pictures by class, from the lists if there are any, else from the directories."""
    pictures = {PurePosixPath(name): name for name in names if PurePosixPath(name).suffix.lower() in EXTENSIONS}
    lists = {PurePosixPath(name).name: name for name in names if PurePosixPath(name).name in LISTS}
    classes: dict[str, list[str]] = {}
    if not lists:
        for path, name in pictures.items():
            if not path.name.startswith("."):
                classes.setdefault(path.parent.name, []).append(name)
        return classes
    places = {path.name: name for path, name in pictures.items()}
    for list_name in LISTS:
        for row in csv.DictReader(io.StringIO(read(lists[list_name]).getvalue().decode())):
            classes.setdefault(row["label"] or "", []).append(places.pop(row["filename"]))
    return classes


def _decoded(names: Sequence[str], read: Read, broken: list[str]) -> Iterator[Array]:
    """Pixels in the order of `names`, zeros for pictures that cannot be read, which are added to `broken`."""

    def decode(name: str) -> Array:
        try:
            with open_picture(read(name)) as picture:
                return np.asarray(square(picture.convert("RGB"), SIDE))
        except Exception:  # noqa: BLE001 - a damaged zip member raises as many kinds of exceptions as a damaged picture
            broken.append(name)
            return np.zeros((SIDE, SIDE, 3), np.uint8)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for start in range(0, len(names), 256):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pixels = np.stack(list(threads.map(decode, names[start : start + 256])))
            yield pixels
