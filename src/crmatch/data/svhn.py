"""SVHN's cropped digits from the official MATLAB files; `extra_32x32.mat` joins the training images where it is given."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.io import loadmat, whosmat

from crmatch.data.cifar import check_labels
from crmatch.data.members import refused
from crmatch.data.packed import CHUNK, Array, Rows, chunks

if TYPE_CHECKING:
    from crmatch.data.catalog import SourceSet

IMAGE = (32, 32, 3)
COMPRESSED = 15
SPARE = 1 << 20


def read_svhn(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """The arrays of `train_32x32.mat`, `test_32x32.mat` and, where there is a third path, `extra_32x32.mat`.

    X is uint8 (32, 32, 3, N), row by column by channel by image; y holds 1..9 for these digits and 10 for 0.
    """
    train, test, *extra = paths
    arrays: dict[str, Array | Rows] = {}
    for part, files in (("train", [train, *extra]), ("test", [test])):
        counts = [_count(file, entry.counts[part]) for file in files]
        if sum(counts) != entry.counts[part]:
            raise refused(files[0], f"the {part} part has {sum(counts):,} images, not {entry.counts[part]:,}")
        arrays[f"{part}_images"] = Rows((sum(counts), *IMAGE), _images(files))
        arrays[f"{part}_labels"] = np.concatenate([_labels(*pair) for pair in zip(files, counts, strict=True)])
    return arrays | {"class_names": np.array([str(digit) for digit in range(10)])}


def _count(path: Path, most: int) -> int:
    """Number of images in a file, after a look at nothing but its layout."""
    _check_inflated_size(path, most * (math.prod(IMAGE) + 8) + SPARE)
    try:
        variables = [(name, tuple(shape), kind) for name, shape, kind in whosmat(str(path))]
    except Exception as error:
        raise refused(path, "it is no MATLAB 5 file or is damaged") from error
    found = {name: (shape, kind) for name, shape, kind in variables}
    shape, kind = found.get("X", ((), ""))
    if len(found) != len(variables) or len(shape) != 4 or shape[:3] != IMAGE or kind != "uint8":
        raise refused(path, "it has no images X of type uint8 (32, 32, 3, N)")
    if found.get("y", ((),))[0] not in ((shape[3], 1), (1, shape[3])):
        raise refused(path, f"it has no list y of {shape[3]:,} labels")
    return int(shape[3])


def _check_inflated_size(path: Path, most: int) -> None:
    """Inflate every compressed variable piece by piece, keeping nothing: `loadmat` would believe any size."""
    try:
        with open(path, "rb") as file:
            file.seek(128)
            while head := file.read(8):
                kind, left = struct.unpack("<2I", head)
                stream = zlib.decompressobj()
                while left:
                    piece = file.read(min(left, 1 << 16))
                    if not piece:
                        raise refused(path, "it is cut off")
                    left -= len(piece)
                    while kind == COMPRESSED and piece:
                        most -= len(stream.decompress(piece, CHUNK))
                        piece = stream.unconsumed_tail
                        if most < 0:
                            raise refused(path, "it is larger than the official file can be")
    except (OSError, zlib.error, struct.error) as error:
        raise refused(path, "it is no MATLAB 5 file or is damaged") from error


def _load(path: Path, name: str) -> Array:
    try:
        return np.asarray(loadmat(str(path), variable_names=[name])[name])
    except Exception as error:
        raise refused(path, f"its variable {name} cannot be read") from error


def _images(paths: Sequence[Path]) -> Iterator[Array]:
    for path in paths:
        yield from chunks(_load(path, "X").transpose(3, 0, 1, 2))


def _labels(path: Path, count: int) -> Array:
    labels = _load(path, "y").ravel()
    if labels.dtype.kind not in "iuf" or len(labels) != count or (labels != np.rint(labels)).any():
        raise refused(path, "its labels y are no whole numbers")
    check_labels(path, labels, 1, 10)
    return labels.astype(np.int64) % 10
