"""Decoded pictures on disk: one array of pixels per folder and image size, mapped into memory. Imports no torch.

`<cache_dir>/<hash>/` holds the pixels, `index.json`, which names them, and a lock. The index is written last and by renaming,
so that a killed writer leaves nothing that would be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from crmatch.atomic_files import read_json, write_file
from crmatch.data.folder.decode import DECODER, FACTS, SMALLEST_SIDE, Pixels, Progress, choose_size, decode_rows
from crmatch.errors import DataError, RequestError

_INDEX = "index.json"
_BLOCK_BYTES = 1 << 24
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on


class Listing(NamedTuple):
    """Pictures to be decoded."""

    folder: Path
    paths: Sequence[str]
    stats: NDArray[np.int64]
    """(N, 3): bytes, times of the last change of content and of anything, in ns."""

    @property
    def key(self) -> str:
        """Changes when any picture does."""
        return _hash("\0".join(self.paths).encode(), np.ascontiguousarray(self.stats).tobytes()).hex()

    @property
    def states(self) -> NDArray[np.uint64]:
        """(N,): each changes when its picture does."""
        hashes = (_hash(path.encode(), row.tobytes()) for path, row in zip(self.paths, self.stats, strict=True))
        return np.frombuffer(b"".join(value[:8] for value in hashes), np.uint64)

    def suited(self) -> tuple[int, int]:
        """Image size and channels that suit the pictures."""
        return choose_size([f"{self.folder}/{path}" for path in self.paths])


class Decoded(NamedTuple):
    """The readable pictures of a listing, and why the others are not.

    Attributes:
        pixels: uint8 (R, size, size, channels), mapped; writing into it changes nothing on disk.
        rows: int64 (R,): position of each in the listing, ascending.
        facts: (R,) of type `FACTS`: what each is.
        broken: reason by position in the listing.
    """

    pixels: Pixels
    rows: NDArray[np.int64]
    facts: NDArray[Any]
    broken: dict[int, str]


def cached_pixels(listing: Listing, size: int | None, cache_dir: Path, progress: Progress | None = None) -> Decoded:
    """The listed pictures in `size` (by default one that suits them), decoded once and mapped from `cache_dir` afterwards.

    When some of the pictures have changed, only those are decoded again. One channel where every readable one is gray.
    """
    suited = None
    if size is None:
        suited = listing.suited()
        size = suited[0]
    if size < SMALLEST_SIDE:
        raise RequestError(f"image size {size} is too small.\nUse {SMALLEST_SIDE} pixels or more.")
    key = listing.key
    slot = cache_dir / _hash(f"{listing.folder}\0{size}\0{DECODER}".encode()).hex()
    try:
        index = _read_index(slot)
        if index is not None and index["key"] == key:
            with contextlib.suppress(FileNotFoundError):  # another process has just replaced it
                return _open(slot, index)
        slot.mkdir(parents=True, exist_ok=True)
        with FileLock(slot / "lock"):
            index = _read_index(slot)
            if index is None or index["key"] != key:
                index = _Writer(slot, listing, size, progress).write(index, suited)
            return _open(slot, index)
    except OSError as error:
        raise DataError(
            f"decoded pictures cannot be kept in {slot}: {error.strerror or error}.\n"
            "Free some space, or choose another --data-dir."
        ) from error


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


def _read_index(slot: Path) -> dict[str, Any] | None:
    """The index of `slot` where it and its pixels are whole."""
    try:
        index: dict[str, Any] = read_json(slot / _INDEX)
        return index if (slot / index["pixels"]).stat().st_size == np.prod(index["shape"]) else None
    except (DataError, OSError, KeyError, TypeError):
        return None


def _open(slot: Path, index: dict[str, Any]) -> Decoded:
    broken = {row: reason for row, reason in index["broken"]}
    rows = np.delete(np.arange(len(index["states"])), list(broken))
    facts = np.empty(len(rows), FACTS)
    for name, values in index["facts"].items():
        facts[name] = values
    return Decoded(_map(slot / index["pixels"], index["shape"]), rows, facts, broken)


def _map(path: Path, shape: Sequence[int]) -> Pixels:
    """Pixels as they lie on disk, copied on writing; nothing is reserved, so that they may be larger than the memory.

    np.memmap's mode "c" reserves: Linux then refuses what exceeds the memory.
    """
    with open(path, "rb") as file:
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        content = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(content, np.uint8).reshape(shape)


class _Writer:
    """Fills a slot, under its lock."""

    def __init__(self, slot: Path, listing: Listing, size: int, progress: Progress | None) -> None:
        self.slot, self.listing, self.size, self.progress = slot, listing, size, progress
        self.temporary = slot / "pixels.tmp"
        self.states = listing.states
        self.facts = np.empty(len(listing.paths), FACTS)
        self.broken: dict[int, str] = {}

    def write(self, old: dict[str, Any] | None, suited: tuple[int, int] | None) -> dict[str, Any]:
        """Decode what has changed since `old`, the slot's index so far; returns the new index."""
        name = f"pixels-{self.listing.key}"
        try:
            channels = old["shape"][-1] if old else (suited or self.listing.suited())[1]
            if (needed := self._decode(channels, old)) != channels:
                channels = self._decode(needed, old)
            rows = self._close_gaps(channels)
            os.replace(self.temporary, self.slot / name)
        finally:
            self.temporary.unlink(missing_ok=True)
        index = {
            "folder": str(self.listing.folder),
            "key": self.listing.key,
            "pixels": name,
            "shape": [len(rows), self.size, self.size, channels],
            "broken": sorted(self.broken.items()),
            "states": self.states.tolist(),
            "facts": {field: self.facts[field][rows].tolist() for field in FACTS.names or ()},
        }
        write_file(self.slot / _INDEX, json.dumps(index).encode())
        for file in self.slot.glob("pixels-*"):
            if file.name != name:
                file.unlink()
        return index

    def _decode(self, channels: int, old: dict[str, Any] | None) -> int:
        """Fill the temporary file; returns the channels needed, at once where one is not enough."""
        paths, self.broken = self.listing.paths, {}
        self.temporary.unlink(missing_ok=True)  # a killed writer's last worker may still hold it
        with open(self.temporary, "wb") as file:  # ask for the disk space before the work
            os.posix_fallocate(file.fileno(), 0, len(paths) * self.size**2 * channels)
        todo = np.ones(len(paths), bool)
        if old is not None and old["shape"][-1] == channels:
            self._copy(_open(self.slot, old), np.array(old["states"], np.uint64), todo)
        jobs = [(row, f"{self.listing.folder}/{paths[row]}") for row in np.flatnonzero(todo).tolist()]
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

    def _copy(self, old: Decoded, states: NDArray[np.uint64], todo: NDArray[np.bool_]) -> None:
        """Take over what is known of pictures that have not changed since the slot was last filled."""
        _, now, before = np.intersect1d(self.states, states, return_indices=True)
        place = np.full(len(states), -1)
        place[old.rows] = np.arange(len(old.rows))
        target = np.memmap(self.temporary, np.uint8, "r+", shape=(len(todo), *old.pixels.shape[1:]))
        for row, was in zip(now.tolist(), before.tolist(), strict=True):
            if was in old.broken:
                self.broken[row] = old.broken[was]
            else:
                target[row], self.facts[row] = old.pixels[place[was]], old.facts[place[was]]
        todo[now] = False

    def _close_gaps(self, channels: int) -> NDArray[np.int64]:
        """Move rows down over those of broken pictures and bring the file to disk; returns the rows that are left."""
        count, length = len(self.facts), self.size**2 * channels
        rows = np.delete(np.arange(count), list(self.broken))
        if not len(rows):
            raise DataError(
                f"none of the {count} pictures in {self.listing.folder} can be read.\n"
                f"The first, {self.listing.paths[0]}: {self.broken[0]}"
            )
        if self.broken:
            pixels = np.memmap(self.temporary, np.uint8, "r+", shape=(count, length))
            block = max(1, _BLOCK_BYTES // length)
            for start in range(min(self.broken), len(rows), block):
                moved = rows[start : start + block]
                pixels[start : start + len(moved)] = pixels[moved]
            pixels.flush()
        with open(self.temporary, "r+b") as file:
            file.truncate(len(rows) * length)
            os.fsync(file.fileno())
        return rows
