"""SVHN's cropped digits from the official MATLAB files; `extra_32x32.mat` joins the training images where it is given.

The files are read by our own few lines, piece by piece: `scipy.io.loadmat` holds all of a file twice, believes any size
it is told, and ends the whole process on some damaged files.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from crmatch.data.official.cifar import check_labels
from crmatch.data.official.members import refused
from crmatch.data.packed import Array, Rows

if TYPE_CHECKING:
    from crmatch.data.official.catalog import SourceSet

SIDE = 32
IMAGE = (SIDE, SIDE, 3)
BATCH = 1024
MOST_VARIABLES = 100
MATRIX, COMPRESSED = 14, 15
UINT8_CLASS = 9
STORED = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8"}
"""How MATLAB stores numbers: a number's code in the file -> its type."""


def read_svhn(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """The arrays of `train_32x32.mat`, `test_32x32.mat` and, where there is a third path, `extra_32x32.mat`.

    X is uint8 (32, 32, 3, N), row by column by channel by image, the first index running fastest; y holds 1..9 for these
    digits and 10 for 0.
    """
    train, test, *extra = paths
    arrays: dict[str, Array | Rows] = {}
    for part, files in (("train", [train, *extra]), ("test", [test])):
        labels = np.concatenate([_labels(file, entry.counts[part]) for file in files])
        if len(labels) != entry.counts[part]:
            raise refused(files[0], f"the {part} part has {len(labels):,} images, not {entry.counts[part]:,}")
        arrays[f"{part}_images"] = Rows((len(labels), *IMAGE), (images for file in files for images in _images(file)))
        arrays[f"{part}_labels"] = labels
    return arrays | {"class_names": np.array([str(digit) for digit in range(10)])}


class _Variable(NamedTuple):
    start: int
    """Position of its element in the file."""
    kind: int
    shape: tuple[int, ...]


class _Element:
    """The bytes of one variable, inflated where it is compressed, read forward."""

    def __init__(self, path: Path, file: IO[bytes], start: int) -> None:
        self._path, self._file = path, file
        file.seek(start)
        kind, self._left = struct.unpack("<2I", file.read(8))
        self.end = start + 8 + self._left
        self._inflater = zlib.decompressobj() if kind == COMPRESSED else None
        if (struct.unpack("<2I", self.read(8))[0] if self._inflater else kind) != MATRIX:
            raise refused(path, "it holds something else than variables")

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes."""
        pieces = []
        while count:
            piece = self._input(count)
            content = self._inflater.decompress(piece, count) if self._inflater else piece
            if not piece and not content:
                raise refused(self._path, "it is cut off")
            pieces.append(content)
            count -= len(content)
        return b"".join(pieces)

    def _input(self, count: int) -> bytes:
        if self._inflater and self._inflater.unconsumed_tail:
            return self._inflater.unconsumed_tail
        piece = self._file.read(min(self._left, 1 << 16 if self._inflater else count))
        self._left -= len(piece)
        return piece

    def field(self, largest: int) -> tuple[int, bytes]:
        """The next small field: code of its type, content."""
        code, size = self.tag()
        if code >> 16:  # up to four bytes lie in the tag itself
            return code & 0xFFFF, struct.pack("<I", size)[: code >> 16]
        if size > largest:
            raise refused(self._path, f"it has a field of {size:,} bytes")
        return code, self.read(size + -size % 8)[:size]

    def tag(self) -> tuple[int, int]:
        """(code of the type, bytes) of the next field."""
        code, size = struct.unpack("<2I", self.read(8))
        return code, size

    def finish(self) -> None:
        """Go to the end, where the compression's own checksum is compared."""
        while self._inflater and not self._inflater.eof:
            piece = self._input(0)
            if not piece or len(self._inflater.decompress(piece, 16)) > 8:
                raise refused(self._path, "it is cut off or has more than it says")


def _open(path: Path, file: IO[bytes], name: str) -> tuple[_Variable, _Element]:
    """A variable that occurs once, and its element up to where its numbers begin."""
    if file.read(128)[124:] != b"\x00\x01IM":
        raise refused(path, "it is no MATLAB 5 file")
    length = file.seek(0, 2)
    found, position = [], 128
    for _ in range(MOST_VARIABLES):
        if position + 8 > length:
            break
        element = _Element(path, file, position)
        variable, label = _describe(element, position)
        if label == name:
            found.append(variable)
        position = element.end
    if position > length or len(found) != 1:
        raise refused(path, f"it is cut off or does not have one variable {name}")
    element = _Element(path, file, found[0].start)
    _describe(element, found[0].start)
    return found[0], element


def _describe(element: _Element, start: int) -> tuple[_Variable, str]:
    flags, shape, name = (element.field(256)[1] for _ in range(3))
    sizes = struct.unpack(f"<{len(shape) // 4}i", shape)
    return _Variable(start, flags[0], sizes), name.decode("latin-1")


def _labels(path: Path, most: int) -> Array:
    try:
        with open(path, "rb") as file:
            images, _ = _open(path, file, "X")
            if images.kind != UINT8_CLASS or len(images.shape) != 4 or images.shape[:3] != IMAGE:
                raise refused(path, "it has no images X of type uint8 (32, 32, 3, N)")
            count = images.shape[3]
            if not 0 < count <= most:
                raise refused(path, f"it has {count:,} images, not {most:,}")
            file.seek(0)
            variable, element = _open(path, file, "y")
            code, content = element.field(8 * count)
            element.finish()
    except (OSError, zlib.error, struct.error, IndexError) as error:
        raise refused(path, "it is damaged or no MATLAB 5 file") from error
    if code not in STORED or len(content) != count * np.dtype(STORED[code]).itemsize or math.prod(variable.shape) != count:
        raise refused(path, f"it has no list y of {count:,} labels")
    labels = np.frombuffer(content, STORED[code])
    if (labels != np.rint(labels)).any():
        raise refused(path, "its labels y are no whole numbers")
    check_labels(path, labels, 1, 10)
    return labels.astype(np.int64) % 10


def _images(path: Path) -> Iterator[Array]:
    try:
        with open(path, "rb") as file:
            variable, element = _open(path, file, "X")
            count = variable.shape[3]
            code, size = element.tag()
            if STORED.get(code) != "u1" or size != count * math.prod(IMAGE):
                raise refused(path, "its images X are not stored as bytes")
            for start in range(0, count, BATCH):
                rows = min(BATCH, count - start)
                planes = np.frombuffer(element.read(rows * math.prod(IMAGE)), np.uint8).reshape(rows, 3, SIDE, SIDE)
                yield planes.transpose(0, 3, 2, 1)  # (image, channel, column, row) -> (image, row, column, channel)
            element.finish()
    except (OSError, zlib.error, struct.error, IndexError) as error:
        raise refused(path, "its images X are damaged") from error
