"""mini-ImageNet from a user's own directory or zip file of pictures: 100 classes of 600, made square with 84 pixels.

There is either one directory per class, or the three lists of Ravi and Larochelle (`train.csv`, `val.csv`, `test.csv`, each
with the columns `filename,label`), which take precedence. All 60,000 pictures form one pool.

500 pictures of each class are for training and 100 for testing (the published code permutes the whole pool once, with the
same seed, which leaves the classes unequal). The split: classes in the order of their names, the pictures of a class in the
order of their file names, for each class in turn `permutation(600)` of one `numpy.random.RandomState(42)`; the first 500
are for training. Rows are ordered by class, then by file name.

There is no official file and thus no checksum, so a zip file is not trusted: nothing is unpacked to disk, sizes are limited,
and pictures are opened by `open_picture`, which limits formats and pixels.
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
from crmatch.errors import DataError, printable

SIDE = 84
SEED = 42
LISTS = ("train.csv", "val.csv", "test.csv")
LARGEST_MEMBER = 1 << 26
Read = Callable[[str], io.BytesIO]


def read_mini_imagenet(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """The arrays of a directory or zip file; pictures are decoded while they are written."""
    (path,) = paths
    parts = {part: entry.counts[part] // entry.classes for part in ("train", "test")}
    pool = sum(parts.values())
    try:
        names, read = _open(path)
        classes = _classes(names, read)
        if len(classes) != entry.classes:
            raise ValueError(f"it has pictures of {len(classes)} classes, not {entry.classes}")
        if wrong := {name: len(files) for name, files in classes.items() if len(files) != pool}:
            raise ValueError(f"class {next(iter(wrong))[:80]} has {next(iter(wrong.values()))} pictures, not {pool}")
    except Exception as error:  # zipfile and csv raise many kinds of exceptions on damaged files
        raise _refused(path, str(error)) from error
    random = np.random.RandomState(SEED)
    rows: dict[str, list[str]] = {part: [] for part in parts}
    for _, files in sorted(classes.items()):
        order, files = random.permutation(pool), sorted(files)
        rows["train"] += [files[k] for k in sorted(order[: parts["train"]])]
        rows["test"] += [files[k] for k in sorted(order[parts["train"] :])]
    arrays: dict[str, Array | Rows] = {"class_names": np.array(sorted(classes))}
    broken: list[str] = []
    for part, count in parts.items():
        images = _decode(path, rows[part], read, broken, is_last=part == "test")
        arrays[f"{part}_images"] = Rows((len(rows[part]), SIDE, SIDE, 3), images)
        arrays[f"{part}_labels"] = np.repeat(np.arange(entry.classes), count)
    return arrays


def _refused(path: Path, reason: str) -> DataError:
    return DataError(f"{path} cannot be used: {printable(reason)[:400]}.\nNothing was written. Give a copy with --from PATH.")


def _open(path: Path) -> tuple[list[str], Read]:
    """Names of all files, and a function that reads one of them."""
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
        return names, lambda name: io.BytesIO((path / name).read_bytes())
    archive = zipfile.ZipFile(path)
    for name in archive.namelist():
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ValueError(f"it has a member named {name[:80]}")

    def read(name: str) -> io.BytesIO:
        info = archive.getinfo(name)
        if info.file_size > LARGEST_MEMBER:
            raise ValueError(f"{name} is too large")
        with archive.open(info) as member:
            return io.BytesIO(member.read(info.file_size))  # a member that inflates to more fails its CRC

    return archive.namelist(), read


def _classes(names: Sequence[str], read: Read) -> dict[str, list[str]]:
    """Pictures by class, from the lists if there are any, else from the directories."""
    files = {PurePosixPath(name): name for name in names}
    pictures = {path: name for path, name in files.items() if path.suffix.lower() in EXTENSIONS and path.name[0] != "."}
    lists = {path.name: name for path, name in files.items() if path.name in LISTS}
    classes: dict[str, list[str]] = {}
    if not lists:
        for path, name in pictures.items():
            classes.setdefault(path.parent.name, []).append(name)
        return classes
    places = {path.name: name for path, name in pictures.items()}
    for list_name in LISTS:
        if list_name not in lists:
            raise ValueError(f"it has {', '.join(sorted(lists))}, but no {list_name}")
        for row in csv.DictReader(io.StringIO(read(lists[list_name]).getvalue().decode())):
            if not row.get("label") or row.get("filename") not in places:
                raise ValueError(f"{list_name} does not list pictures that are here, by filename,label")
            classes.setdefault(row["label"], []).append(places.pop(row["filename"]))
    return classes


def _decode(path: Path, names: Sequence[str], read: Read, broken: list[str], is_last: bool) -> Iterator[Array]:
    """Pixels in the order of `names`. Unreadable pictures are collected in `broken`; the last part raises an error for all."""

    def decode(name: str) -> Array:
        try:
            with open_picture(read(name)) as picture:
                return np.asarray(square(picture.convert("RGB"), SIDE))
        except Exception:  # noqa: BLE001 - damaged members and pictures raise many kinds of exceptions
            broken.append(name)
            return np.zeros((SIDE, SIDE, 3), np.uint8)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for start in range(0, len(names), 256):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pixels = np.stack(list(threads.map(decode, names[start : start + 256])))
            yield pixels
    if is_last and broken:
        raise _refused(path, f"{len(broken)} of its pictures cannot be read: {join_names(broken)}")
