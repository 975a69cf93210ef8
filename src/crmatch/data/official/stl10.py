"""STL-10 from the official binary archive, with its ten folds of labeled images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from crmatch.data.official.cifar import check_labels, class_names
from crmatch.data.official.members import Member, refused, tar_members
from crmatch.data.packed import Array, Rows

if TYPE_CHECKING:
    from crmatch.data.official.catalog import SourceSet

SIDE = 96
PIXELS = 3 * SIDE * SIDE
FOLDS = 10
TEXT = 1 << 20
FOLDER = "stl10_binary"
UNLABELED = f"{FOLDER}/unlabeled_X.bin"


def read_stl10(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """The arrays of `stl10_binary.tar.gz`.

    An image is its red, green and blue plane, each column by column. Labels run from 1. Line k of `fold_indices.txt`
    lists the rows of the training set that are labeled in fold k. The unlabeled images, nine tenths of the file, are
    read in a second pass while they are written.
    """
    (path,) = paths
    sizes = {f"{FOLDER}/{part}_X.bin": entry.counts[part] * PIXELS for part in ("train", "test", "unlabeled")}
    sizes |= {f"{FOLDER}/{part}_y.bin": entry.counts[part] for part in ("train", "test")}
    found: dict[str, Array] = {}
    for member in tar_members(path, sizes | {f"{FOLDER}/class_names.txt": TEXT, f"{FOLDER}/fold_indices.txt": TEXT}):
        name = member.name.removeprefix(f"{FOLDER}/")
        if member.size != sizes.get(member.name, member.size):
            raise refused(path, f"{member.name} has {member.size:,} bytes, not {sizes[member.name]:,}")
        if name.endswith("_y.bin"):
            found[name] = np.frombuffer(member.read(), np.uint8).astype(np.int64) - 1
            check_labels(path, found[name] + 1, 1, entry.classes)
        elif name == "class_names.txt":
            found[name] = np.array(class_names(path, member.lines(), entry.classes))
        elif name == "fold_indices.txt":
            found[name] = _folds(path, member.lines(), entry)
        elif member.name != UNLABELED:
            found[name] = np.empty((member.size // PIXELS, SIDE, SIDE, 3), np.uint8)
            for start, images in _images(member, len(found[name])):
                found[name][start : start + len(images)] = images
    shape = (entry.counts["unlabeled"], SIDE, SIDE, 3)
    return {
        "train_images": found["train_X.bin"],
        "train_labels": found["train_y.bin"],
        "test_images": found["test_X.bin"],
        "test_labels": found["test_y.bin"],
        "unlabeled_images": Rows(shape, _unlabeled(path, sizes)),
        "folds": found["fold_indices.txt"],
        "class_names": found["class_names.txt"],
    }


def _images(member: Member, count: int) -> Iterator[tuple[int, Array]]:
    for start in range(0, count, 256):
        rows = min(256, count - start)
        planes = np.frombuffer(member.read(rows * PIXELS), np.uint8).reshape(rows, 3, SIDE, SIDE)
        yield start, planes.transpose(0, 3, 2, 1)  # (image, channel, column, row) -> (image, row, column, channel)


def _unlabeled(path: Path, sizes: dict[str, int]) -> Iterator[Array]:
    for member in tar_members(path, sizes):
        if member.name == UNLABELED:
            yield from (images for _, images in _images(member, sizes[UNLABELED] // PIXELS))


def _folds(path: Path, lines: Sequence[str], entry: SourceSet) -> Array:
    rows, size = entry.counts["train"], entry.counts["fold"]
    try:
        folds = [[int(word) for word in line.split()] for line in lines]
    except ValueError as error:
        raise refused(path, "fold_indices.txt has something else than numbers") from error
    if len(folds) != FOLDS or any(len(set(fold)) != size or len(fold) != size for fold in folds):
        raise refused(path, f"fold_indices.txt does not have {FOLDS} lines of {size:,} different rows")
    if any(not 0 <= row < rows for fold in folds for row in fold):
        raise refused(path, f"fold_indices.txt names a row outside 0 to {rows - 1:,}")
    return np.array(folds, np.int64)
