"""The packed format: one `<name>.npz` per data set, every array checked while it is read. Imports no torch.

Keys: `train_images` uint8 (N, H, W, C), `train_labels`, `test_images`, `test_labels`; optional `unlabeled_images`,
`folds`, `class_names`. Written uncompressed, so that large members are mapped where they lie and a set opens at once.
"""

from __future__ import annotations

import contextlib
import lzma
import math
import os
import shutil
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from crmatch.errors import DataError

REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
MAPPED_FROM = 1 << 26
"""Bytes from which an uncompressed member is mapped; smaller ones are read, which verifies their CRC."""
CHUNK = 1 << 22
SPARE = 1 << 26
"""Bytes of a disk that are left free."""
Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
_BROKEN = (
    OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, OverflowError, SyntaxError, TypeError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, tokenize.TokenError,
)  # fmt: skip


class Progress(Protocol):
    """What shows how far a transfer or conversion is."""

    def start(self, total: int | None, already: int, label: str) -> None:
        """A piece of work of `total` bytes begins, `already` of them done before."""

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""

    def stop(self) -> None:
        """The piece of work ended, in whatever way."""


class Rows(NamedTuple):
    """A uint8 array whose rows are made while they are written, for sets larger than memory."""

    shape: tuple[int, ...]
    chunks: Iterable[Array]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Rows are pixels."""
        return np.dtype(np.uint8)


def packed_path(name: str, data_dir: Path) -> Path:
    """Where the packed set `name` lies."""
    return data_dir / f"{name}.npz"


def read_packed(path: Path) -> Arrays:
    """The arrays of a packed set, types and shapes checked; `class_names` are added where the file has none.

    Large uncompressed members are mapped copy-on-write: their pages are read when they are looked at.

    Raises:
        DataError: the file is missing, damaged or not a packed set.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            members = {info.filename[:-4]: info for info in archive.infolist() if info.filename.endswith(".npy")}
            missing = [key for key in REQUIRED if key not in members]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}.\nA packed set needs {', '.join(REQUIRED)}.")
            arrays: Arrays = {key: _read_member(file, archive, info) for key, info in members.items()}
    except DataError:
        raise
    except _BROKEN as error:
        raise _unreadable(path, error) from error
    for key, array in arrays.items():
        if key.endswith("_images") and (array.dtype != np.uint8 or array.ndim != 4):
            raise DataError(f"{key} of {path} must be uint8 (N, H, W, C), found {array.dtype} {array.shape}.")
        if key.endswith("_labels") and (array.dtype.kind not in "iu" or array.ndim != 1 or not array.size):
            raise DataError(f"{key} of {path} must be a list of integers, found {array.dtype} {array.shape}.")
    if "class_names" not in arrays:
        arrays["class_names"] = np.array([str(label) for label in range(int(arrays["train_labels"].max()) + 1)])
    return arrays


def packed_image_shape(path: Path) -> tuple[int, int, int]:
    """(height, width, channels) of a packed set, read from a header of a few bytes."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("train_images.npy") as member:
            shape = _header(member)[0]
    except _BROKEN as error:
        raise _unreadable(path, error) from error
    if len(shape) != 4:
        raise DataError(f"train_images of {path} has shape {shape}.\nA packed set stores images as (N, H, W, C).")
    return int(shape[1]), int(shape[2]), int(shape[3])


def write_packed(path: Path, arrays: Mapping[str, Array | Rows], progress: Progress | None = None) -> None:
    """Write a packed set, whole or not at all; the same arrays give the same bytes.

    Arrays of any strides are written row by row, so nothing is held twice.

    Raises:
        DataError: the disk is full or not writable; whatever was at `path` is still there.
    """
    total = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
    with _replacing(path, total) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        if progress:
            progress.start(total, 0, f"writing {path.name}")
        try:
            for key, array in arrays.items():
                with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as member:
                    description = np.lib.format.dtype_to_descr(array.dtype)
                    layout = {"descr": description, "fortran_order": False, "shape": array.shape}
                    np.lib.format.write_array_header_1_0(member, layout)
                    rows = 0
                    for chunk in array.chunks if isinstance(array, Rows) else chunks(array):
                        assert chunk.dtype == array.dtype
                        assert chunk.shape[1:] == array.shape[1:]
                        rows += len(chunk)
                        member.write(np.ascontiguousarray(chunk).data)
                        if progress:
                            progress.advance(chunk.nbytes)
                    assert rows == array.shape[0], f"{key} has {rows} rows, not {array.shape[0]}"
        finally:
            if progress:
                progress.stop()


def require_space(directory: Path, needed: int) -> None:
    """Raise a `DataError` unless the disk of `directory` has `needed` bytes and some more."""
    free = shutil.disk_usage(directory).free
    if free < needed + SPARE:
        raise DataError(
            f"{directory} has {free / 1e9:.2f} GB free, {(needed + SPARE) / 1e9:.2f} GB are needed.\n"
            "Free some space, or choose another --data-dir."
        )


def cannot_write(path: Path, error: OSError) -> DataError:
    """The error for a file that cannot be written."""
    reason = error.strerror or type(error).__name__
    return DataError(f"cannot write {path}: {reason}.\nFree some space, or choose a --data-dir you may write to.")


def temporary_files(path: Path) -> Iterator[Path]:
    """Unfinished files that a killed process left beside `path`."""
    return path.parent.glob(f".{path.name}.*.tmp")


@contextlib.contextmanager
def _replacing(path: Path, size: int) -> Iterator[IO[bytes]]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        require_space(path.parent, size)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def chunks(array: Array) -> Iterator[Array]:
    """The rows of an array in pieces of a few megabytes."""
    rows = max(1, CHUNK * len(array) // max(1, array.nbytes))
    return (array[start : start + rows] for start in range(0, len(array), rows))


def _read_member(file: IO[bytes], archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    with archive.open(info) as member:
        shape, fortran_order, dtype = _header(member)
        header = member.tell()
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or header + size != info.file_size:
        raise ValueError(f"{info.filename} does not hold what its header says")
    if info.compress_type != zipfile.ZIP_STORED or dtype.itemsize != 1 or size < MAPPED_FROM:
        with archive.open(info) as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    file.seek(info.header_offset)
    name, extra = struct.unpack("<26x2H", file.read(30))
    start = info.header_offset + 30 + name + extra
    if info.compress_size != info.file_size or start + info.file_size > os.fstat(file.fileno()).st_size:
        raise ValueError(f"{info.filename} is cut off")
    order: Any = "F" if fortran_order else "C"
    return np.asarray(np.memmap(file, dtype, "c", start + header, shape, order))


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(member)


def _unreadable(path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        found = sorted(file.stem for file in path.parent.glob("*.npz")) or ["no packed set"]
        return DataError(f"there is no {path.name} in {path.parent}.\nFound there: {', '.join(found)}")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{path} cannot be read as a packed set: {reason}\nReplace the file: it is damaged or no .npz.")
