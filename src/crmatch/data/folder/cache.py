"""Decoded pictures on disk: one file of pixels per folder and image size, memory-mapped. Imports no torch.

They hold people's pictures and may be larger than these: they are limited in size, and `crmatch data clean` removes them.

`<data_dir>/folders/<hash>/` contains the pixels, `index.json`, which describes them, and a lock. The index is written last and
atomically, so a killed writer leaves nothing that would be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from crmatch.atomic_files import checksum, make_directory, read_json, write_file
from crmatch.data.folder.decode import DECODER, FACTS, Pixels, choose_size
from crmatch.data.folder.scan import FolderIndex
from crmatch.data.folder.workers import Progress, decode_rows
from crmatch.data.settings import default_data_dir
from crmatch.data.square import check_size
from crmatch.errors import DataError

MOST_BYTES = 8 * 2**30
"""All decoded pictures together, and all stored features together; the least recently used ones are removed first."""
_INDEX = "index.json"
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # has a name since Python 3.13


class Decoded(NamedTuple):
    """The R readable pictures of a folder, and why the others cannot be read."""

    pixels: Pixels  # (R, size, size, channels), mapped copy-on-write
    rows: NDArray[np.int64]  # (R,): position of each picture in the folder's index, ascending
    facts: NDArray[Any]  # (R,) of type `FACTS`
    broken: dict[int, str]  # reason by position in the folder's index


def decode_folder(
    pictures: FolderIndex, size: int | None = None, data_dir: Path | None = None, progress: Progress | None = None
) -> Decoded:
    """Decode the pictures at `size` (None: one that suits them), or map the pixels that an earlier call has decoded.

    If some pictures have changed, only those are decoded again. There is one channel if every readable picture is gray.
    """
    if size is None:
        size = _suitable(pictures)[0]
    check_size(size)
    key = _hash("\0".join(pictures.paths).encode(), np.ascontiguousarray(pictures.stats).tobytes()).hex()
    slot = (data_dir or default_data_dir()) / "folders" / _hash(f"{pictures.folder}\0{size}\0{DECODER}".encode()).hex()
    try:
        index = _read_index(slot)
        if index is not None and index["key"] == key:
            with contextlib.suppress(FileNotFoundError):  # another process has just replaced it
                os.utime(slot)  # used now, see `remove_unused`
                return _open(slot, index)
        make_directory(slot)
        with FileLock(slot / "lock"):
            index = _read_index(slot)
            if index is None or index["key"] != key:
                index = _Writer(slot, pictures, size, progress).write(key, index)
                remove_unused(slot.parent, [slot])
            return _open(slot, index)
    except OSError as error:
        raise DataError(
            f"decoded pictures cannot be kept in {slot}: {error.strerror or error}.\n"
            "Free some space, or choose another --data-dir."
        ) from error


def remove_unused(folder: Path, in_use: Sequence[Path] = (), most: int = MOST_BYTES) -> int:
    """Remove the directories in `folder` that were not used for the longest time, until at most `most` bytes are left.

    Directories that are `in_use` stay. Returns the number of bytes removed.
    """
    removed = 0
    with contextlib.suppress(FileNotFoundError):  # another process changes the folder; the next call removes what is left
        total = sum(_bytes(path) for path in in_use)
        others = [path for path in folder.iterdir() if path.is_dir() and path not in in_use]
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            size = _bytes(path)
            if total + size > most:
                shutil.rmtree(path, ignore_errors=True)
                removed += size
            else:
                total += size
    return removed


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


def _suitable(pictures: FolderIndex) -> tuple[int, int]:
    return choose_size([f"{pictures.folder}/{path}" for path in pictures.paths])


def _read_index(slot: Path) -> dict[str, Any] | None:
    """The index of `slot` if it is readable and its file of pixels is complete."""
    try:
        index: dict[str, Any] = read_json(slot / _INDEX)
        intact = index.pop("checksum", None) == checksum(json.dumps(index).encode())
        return index if intact and (slot / index["pixels"]).stat().st_size == np.prod(index["shape"]) else None
    except (DataError, OSError, AttributeError):
        return None


def _open(slot: Path, index: dict[str, Any]) -> Decoded:
    broken = {row: reason for row, reason in index["broken"]}
    rows = np.delete(np.arange(len(index["states"])), list(broken))
    facts = np.empty(len(rows), FACTS)
    for name, values in index["facts"].items():
        facts[name] = values
    return Decoded(_map(slot / index["pixels"], index["shape"]), rows, facts, broken)


def _map(path: Path, shape: Sequence[int]) -> Pixels:
    """Map a file copy-on-write without reserving memory; np.memmap's mode "c" fails for files larger than the memory."""
    with open(path, "rb") as file:
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        content = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(content, np.uint8).reshape(shape)


class _Writer:
    """Fills a slot, whose lock the caller holds."""

    def __init__(self, slot: Path, pictures: FolderIndex, size: int, progress: Progress | None) -> None:
        self.slot, self.pictures, self.size, self.progress = slot, pictures, size, progress
        self.temporary = slot / "pixels.tmp"
        # One hash per picture, which changes when the picture does.
        hashes = (_hash(path.encode(), row.tobytes()) for path, row in zip(pictures.paths, pictures.stats, strict=True))
        self.states = np.frombuffer(b"".join(value[:8] for value in hashes), np.uint64)
        self.facts = np.empty(len(pictures.paths), FACTS)
        self.broken: dict[int, str] = {}

    def write(self, key: str, old: dict[str, Any] | None) -> dict[str, Any]:
        """Decode the pictures that have changed since `old`, the slot's previous index; returns the new index."""
        name = f"pixels-{key}"
        try:
            channels = old["shape"][-1] if old else _suitable(self.pictures)[1]
            if (needed := self._decode(channels, old)) != channels:
                channels = self._decode(needed, old)
            rows = self._remove_broken_rows(channels)
            os.replace(self.temporary, self.slot / name)
        finally:
            self.temporary.unlink(missing_ok=True)
        index = {
            "folder": str(self.pictures.folder),
            "key": key,
            "pixels": name,
            "shape": [len(rows), self.size, self.size, channels],
            "broken": sorted(self.broken.items()),
            "states": self.states.tolist(),
            "facts": {field: self.facts[field][rows].tolist() for field in FACTS.names or ()},
        }
        write_file(self.slot / _INDEX, json.dumps({**index, "checksum": checksum(json.dumps(index).encode())}).encode())
        for file in self.slot.glob("pixels-*"):
            if file.name != name:
                file.unlink()
        return index

    def _decode(self, channels: int, old: dict[str, Any] | None) -> int:
        """Fill the temporary file; returns the number of channels needed, early if a color picture was found."""
        paths, self.broken = self.pictures.paths, {}
        self.temporary.unlink(missing_ok=True)  # a worker of a killed writer may still write into it
        with open(self.temporary, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, len(paths) * self.size**2 * channels)  # a full disk fails here, not later
        todo = np.ones(len(paths), bool)
        if old is not None and old["shape"][-1] == channels:
            todo[self._copy_unchanged(old)] = False
        jobs = [(row, f"{self.pictures.folder}/{paths[row]}") for row in np.flatnonzero(todo).tolist()]
        done = len(paths) - len(jobs)
        for answers in decode_rows(jobs, self.temporary, self.size, channels):
            self.broken |= {row: reason for row, reason in answers if isinstance(reason, str)}
            readable = {row: tuple(values) for row, values in answers if not isinstance(values, str)}
            self.facts[list(readable)] = np.array(list(readable.values()), FACTS)
            if channels == 1 and not self.facts["gray"][list(readable)].all():
                return 3
            done += len(answers)
            if self.progress:
                self.progress(done, len(paths))
        return 1 if np.delete(self.facts["gray"], list(self.broken)).all() else 3

    def _copy_unchanged(self, index: dict[str, Any]) -> NDArray[np.int64]:
        """Copy pixels and facts of pictures that have not changed since the old `index`; returns their rows."""
        old = _open(self.slot, index)
        _, now, before = np.intersect1d(self.states, np.array(index["states"], np.uint64), return_indices=True)
        place = {row: number for number, row in enumerate(old.rows.tolist())}
        target = np.memmap(self.temporary, np.uint8, "r+", shape=(len(self.states), *old.pixels.shape[1:]))
        for row, was in zip(now.tolist(), before.tolist(), strict=True):
            if was in old.broken:
                self.broken[row] = old.broken[was]
            else:
                target[row], self.facts[row] = old.pixels[place[was]], old.facts[place[was]]
        return now

    def _remove_broken_rows(self, channels: int) -> NDArray[np.int64]:
        """Close the gaps of unreadable pictures in the temporary file and sync it; returns the rows that are left."""
        count, length = len(self.facts), self.size**2 * channels
        rows = np.delete(np.arange(count), list(self.broken))
        if not len(rows):
            raise DataError(
                f"none of the {count} pictures in {self.pictures.folder} can be read.\n"
                f"The first one, {self.pictures.paths[0]}: {self.broken[0]}"
            )
        if self.broken:
            pixels = np.memmap(self.temporary, np.uint8, "r+", shape=(count, length))
            for place in range(min(self.broken), len(rows)):
                pixels[place] = pixels[rows[place]]
            pixels.flush()
        with open(self.temporary, "r+b") as file:
            file.truncate(len(rows) * length)
            os.fsync(file.fileno())
        return rows
