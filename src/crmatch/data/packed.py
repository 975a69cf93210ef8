"""The packed format: one `<name>.npz` per data set. Every array is checked when it is read. Imports no torch.

Keys: `train_images` uint8 (N, H, W, C), `train_labels`, `test_images`, `test_labels`; optional `unlabeled_images`,
`folds`, `class_names`. Files are written without compression, so that large arrays are memory-mapped and a set opens at once.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from crmatch.atomic_files import replacing
from crmatch.data.square import SMALLEST_SIDE
from crmatch.errors import DataError

REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
MAPPED_FROM = 1 << 26
"""Uncompressed arrays of at least this many bytes are memory-mapped; smaller ones are read, which verifies their CRC."""
MOST_EXPANSION = 100
"""A large compressed array that expands more than this is no photos, but made to fill the memory."""
CHUNK = 1 << 22
RESERVED = 1 << 26
"""Bytes of disk space to leave free."""
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


class Progress(Protocol):
    """Shows how far a transfer or conversion is."""

    def start(self, total: int | None, already: int, label: str) -> None:
        """Work on `total` bytes begins; `already` of them were done before."""

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""


class Rows(NamedTuple):
    """A uint8 array whose rows are produced while they are written, for sets larger than memory."""

    shape: tuple[int, ...]
    chunks: Iterable[Array]
    dtype: np.dtype[Any] = np.dtype(np.uint8)


def packed_path(name: str, data_dir: Path) -> Path:
    """Path of the packed set `name`."""
    return data_dir / f"{name}.npz"


def read_packed(path: Path) -> Arrays:
    """Read a packed set and check types and shapes; adds `class_names` (the numbers) if the file has none.

    Large uncompressed arrays are mapped copy-on-write: their pages are read when they are first used.

    Raises:
        DataError: the file is missing, damaged or not a packed set.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = {info.filename[:-4]: info for info in archive.infolist() if info.filename.endswith(".npy")}
            if missing := [key for key in REQUIRED if key not in members]:
                raise DataError(f"{path} has no {', '.join(missing)}.\nA packed set needs {', '.join(REQUIRED)}.")
            arrays: Arrays = {key: _read_member(file, archive, info) for key, info in members.items()}
    except DataError:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen kinds of exceptions on damaged files
        raise _unreadable(path, error) from error
    for key, array in arrays.items():
        if key.endswith("_images") and (array.dtype != np.uint8 or array.ndim != 4):
            raise DataError(f"{key} of {path} must be uint8 (N, H, W, C), found {array.dtype} {array.shape}.")
        if key.endswith("_labels") and (array.dtype.kind not in "iu" or array.ndim != 1 or not array.size):
            raise DataError(f"{key} of {path} must be a list of integers, found {array.dtype} {array.shape}.")
    shapes = {key: array.shape[1:] for key, array in arrays.items() if key.endswith("_images")}
    for key, shape in shapes.items():
        _check_shape(path, shape)
        if shape[2] != shapes["train_images"][2]:
            raise DataError(f"{key} of {path} are {shape}, train_images {shapes['train_images']}.\nUse images of one kind.")
    if shapes.get("unlabeled_images", shapes["train_images"]) != shapes["train_images"]:
        raise DataError(f"unlabeled_images of {path} have another size than train_images.\nUse images of one size.")
    if int(arrays["test_labels"].min()) < 0:
        raise DataError(f"test_labels of {path} has a negative label.\nOnly training images may be unlabeled (-1).")
    if int(arrays["train_labels"].max()) >= len(arrays["train_labels"]):
        found = f"train_labels of {path} go up to {arrays['train_labels'].max()} for {len(arrays['train_labels'])} images"
        raise DataError(f"{found}.\nNumber the classes from 0.")
    if "class_names" not in arrays:
        arrays["class_names"] = np.array([str(label) for label in range(int(arrays["train_labels"].max()) + 1)])
    try:
        "".join(map(str, arrays["class_names"].flat)).encode()
    except UnicodeError as error:
        raise DataError(f"class_names of {path} has characters that cannot be written.\nUse plain text.") from error
    return arrays


def packed_image_shape(path: Path) -> tuple[int, int, int]:
    """(height, width, channels) of a packed set, read from the array's header."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("train_images.npy") as member:
            shape = _read_header(member)[0]
        if len(shape) != 4:
            raise ValueError(f"train_images has shape {shape}, not (N, H, W, C)")
    except Exception as error:
        raise _unreadable(path, error) from error
    _check_shape(path, shape[1:])
    return shape[1], shape[2], shape[3]


def _check_shape(path: Path, shape: tuple[int, ...]) -> None:
    height, width, channels = shape
    if min(height, width) < SMALLEST_SIDE or channels not in (1, 3):
        found = f"the images of {path} have {height}x{width} pixels and {channels} channels"
        raise DataError(f"{found}.\nUse at least {SMALLEST_SIDE} pixels, and 1 or 3 channels.")


def write_packed(path: Path, arrays: Mapping[str, Array | Rows], progress: Progress | None = None) -> None:
    """Write a packed set atomically; the same arrays give the same bytes.

    Arrays of any strides are written in chunks of rows, so none of them is copied as a whole.

    Raises:
        DataError: the disk is full or not writable; a file that was at `path` before is unchanged.
    """
    total = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        require_space(path.parent, total)
        advance = start_progress(progress, total, 0, f"writing {path.name}")
        for key, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as member:
                _write_array(member, array, advance)


def require_space(directory: Path, needed: int) -> None:
    """Raise a `DataError` unless the disk of `directory` has `needed` bytes free, and `RESERVED` more."""
    free = shutil.disk_usage(directory).free
    if free < needed + RESERVED:
        raise DataError(
            f"{directory} has {free / 1e9:.2f} GB free, but {(needed + RESERVED) / 1e9:.2f} GB are needed.\n"
            "Free some space, or choose another --data-dir."
        )


def start_progress(progress: Progress | None, total: int, already: int, label: str) -> Callable[[int], None]:
    """Report work on `total` bytes to `progress`, if there is one; returns the function to call with each number of bytes."""
    if progress is None:
        return lambda count: None
    progress.start(total, already, label)
    return progress.advance


def _write_array(member: IO[bytes], array: Array | Rows, advance: Callable[[int], None]) -> None:
    description = np.lib.format.dtype_to_descr(array.dtype)
    np.lib.format.write_array_header_1_0(member, {"descr": description, "fortran_order": False, "shape": array.shape})
    if isinstance(array, Rows):
        chunks = array.chunks
    else:
        rows = max(1, CHUNK * len(array) // max(1, array.nbytes))
        chunks = (array[start : start + rows] for start in range(0, len(array), rows))
    written = 0
    for chunk in chunks:
        written += len(chunk)
        member.write(np.ascontiguousarray(chunk).data)
        advance(chunk.nbytes)
    assert written == array.shape[0], f"{written} rows instead of {array.shape[0]}"


def _read_member(file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        shape, fortran_order, dtype = _read_header(member)
        header = member.tell()
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or header + size != info.file_size:
        raise ValueError(f"{info.filename} does not contain what its header says")
    if size >= MAPPED_FROM and size > MOST_EXPANSION * info.compress_size:
        raise ValueError(f"{info.filename} would expand more than {MOST_EXPANSION}-fold; store it without compression")
    if info.compress_type != zipfile.ZIP_STORED or dtype.itemsize != 1 or size < MAPPED_FROM:
        with archive.open(info) as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    # An array's bytes follow the zip entry's local header: 30 bytes, the name and extra fields.
    file.seek(info.header_offset)
    name, extra = struct.unpack("<26x2H", file.read(30))
    start = info.header_offset + 30 + name + extra
    if info.compress_size != info.file_size or start + info.file_size > os.fstat(file.fileno()).st_size:
        raise ValueError(f"{info.filename} is truncated")
    order: Any = "F" if fortran_order else "C"
    return np.asarray(np.memmap(file, dtype, "c", start + header, shape, order))


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(member)


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{path} cannot be read as a packed set: {reason}\nReplace the file: it is damaged or not an .npz file.")
