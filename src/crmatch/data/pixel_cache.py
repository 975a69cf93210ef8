"""Decoded pictures on disk: one array of pixels per folder and image size, mapped into memory. Imports no torch.

`<cache_dir>/<hash>/` holds the pixels, `index.json`, which names them, and a lock. The index is written last and by renaming,
so that a killed writer leaves nothing that would be read.
"""

from __future__ import annotations

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

from crmatch.data.decode import SMALLEST_SIDE, Facts, Pixels, Progress, choose_size, decode_rows
from crmatch.errors import DataError, RequestError
from crmatch.files import read_json, write_file

DECODER = 1
"""Part of every cache's key; raise it when the pixels of any picture change."""
_INDEX = "index.json"
_COPIED_ROWS_BYTES = 1 << 25
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
        return _hash("\0".join(self.paths).encode(), np.ascontiguousarray(self.stats).tobytes())


class Decoded(NamedTuple):
    """The readable pictures of a listing, and why the others are not.

    Attributes:
        pixels: uint8 (R, size, size, channels), mapped; writing into it changes nothing on disk.
        rows: int64 (R,): position of each in the listing, ascending.
        facts: what each is.
        broken: reason by position in the listing.
    """

    pixels: Pixels
    rows: NDArray[np.int64]
    facts: list[Facts]
    broken: dict[int, str]


def cached_pixels(listing: Listing, size: int | None, cache_dir: Path, progress: Progress | None = None) -> Decoded:
    """The listed pictures in `size` (by default one that suits them), decoded once and mapped from `cache_dir` afterwards.

    When some of the pictures have changed, only those are decoded again. One channel where every readable one is gray.
    """
    chosen, channels = choose_size([f"{listing.folder}/{path}" for path in listing.paths])
    size = size or chosen
    if size < SMALLEST_SIDE:
        raise RequestError(f"image size {size} is too small.\nUse {SMALLEST_SIDE} pixels or more.")
    slot = cache_dir / _hash(f"{listing.folder}\0{size}\0{DECODER}".encode())
    try:
        index = _read_index(slot)
        if index is None or index["key"] != listing.key:
            slot.mkdir(parents=True, exist_ok=True)
            with FileLock(slot / "lock"):
                index = _read_index(slot)
                if index is None or index["key"] != listing.key:
                    index = _Writer(slot, listing, size, index, progress).write(channels)
        return _open(slot, index, len(listing.paths))
    except OSError as error:
        raise DataError(
            f"decoded pictures cannot be kept in {slot}: {error.strerror or error}.\n"
            "Free some space, or choose another --data-dir."
        ) from error


def _hash(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _read_index(slot: Path) -> dict[str, Any] | None:
    """The index of `slot` where it and its pixels are whole."""
    try:
        index: dict[str, Any] = read_json(slot / _INDEX)
        return index if (slot / index["pixels"]).stat().st_size == np.prod(index["shape"]) else None
    except (DataError, OSError, KeyError, TypeError):
        return None


def _open(slot: Path, index: dict[str, Any], count: int) -> Decoded:
    broken = {row: reason for row, reason in index["broken"]}
    rows = np.setdiff1d(np.arange(count), np.array(list(broken), np.int64), assume_unique=True)
    return Decoded(_map(slot / index["pixels"], index["shape"]), rows, [Facts(*facts) for facts in index["facts"]], broken)


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

    def __init__(self, slot: Path, listing: Listing, size: int, old: dict[str, Any] | None, progress: Progress | None) -> None:
        self.slot, self.listing, self.size, self.old, self.progress = slot, listing, size, old, progress
        self.temporary = slot / "pixels.tmp"

    def write(self, channels: int) -> dict[str, Any]:
        """Decode everything, with `channels` as the first guess, and return the index."""
        name = f"pixels-{self.listing.key}"
        try:
            found = self._decode(channels)
            gray = all(facts.gray for facts in found if isinstance(facts, Facts))
            if gray != (channels == 1):
                channels = 1 if gray else 3
                found = self._decode(channels)
            shape = self._close_gaps(found, channels)
            os.replace(self.temporary, self.slot / name)
        finally:
            self.temporary.unlink(missing_ok=True)
        index = {
            "folder": str(self.listing.folder),
            "key": self.listing.key,
            "pixels": name,
            "shape": shape,
            "facts": [facts for facts in found if isinstance(facts, Facts)],
            "broken": [(row, facts) for row, facts in enumerate(found) if isinstance(facts, str)],
            "paths": list(self.listing.paths),
            "stats": self.listing.stats.tolist(),
        }
        write_file(self.slot / _INDEX, json.dumps(index).encode())
        for file in self.slot.glob("pixels-*"):
            if file.name != name:
                file.unlink()
        return index

    def _decode(self, channels: int) -> list[Facts | str]:
        """Facts or reason per picture; stops early where one channel turns out not to be enough."""
        paths = self.listing.paths
        self._reserve(len(paths) * self.size**2 * channels)
        found = self._copy_known(channels)
        known = len(found)
        jobs = [(row, f"{self.listing.folder}/{path}") for row, path in enumerate(paths) if row not in found]
        for done, row, facts in decode_rows(jobs, self.temporary, self.size, channels):
            found[row] = facts
            if isinstance(facts, Facts) and not facts.gray and channels == 1:
                return [facts]
            if self.progress:
                self.progress(known + done, len(paths))
        return [found[row] for row in range(len(paths))]

    def _reserve(self, length: int) -> None:
        """Ask for the disk space before the work."""
        with open(self.temporary, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, length)

    def _copy_known(self, channels: int) -> dict[int, Facts | str]:
        """Copy the rows of pictures that have not changed since the slot was last filled."""
        if self.old is None or self.old["shape"][-1] != channels:
            return {}
        old = _open(self.slot, self.old, len(self.old["paths"]))
        states = map(tuple, self.old["stats"])
        position = {state: row for row, state in enumerate(zip(self.old["paths"], states, strict=True))}
        stored = {int(row): place for place, row in enumerate(old.rows)}
        found: dict[int, Facts | str] = {}
        target = np.memmap(self.temporary, np.uint8, "r+", shape=(len(self.listing.paths), *old.pixels.shape[1:]))
        for row, state in enumerate(zip(self.listing.paths, map(tuple, self.listing.stats.tolist()), strict=True)):
            before = position.get(state)
            if before in stored:
                target[row] = old.pixels[stored[before]]
                found[row] = old.facts[stored[before]]
            elif before is not None:
                found[row] = old.broken[before]
        return found

    def _close_gaps(self, found: Sequence[Facts | str], channels: int) -> list[int]:
        """Move rows down over those of broken pictures and bring the file to disk; the shape of what is left."""
        kept = np.array([row for row, facts in enumerate(found) if isinstance(facts, Facts)], np.int64)
        if not len(kept):
            raise DataError(
                f"none of the {len(found)} pictures in {self.listing.folder} can be read.\n"
                f"The first, {self.listing.paths[0]}: {found[0]}"
            )
        shape = [len(kept), self.size, self.size, channels]
        length = self.size**2 * channels
        if len(kept) < len(found):
            pixels = np.memmap(self.temporary, np.uint8, "r+", shape=(len(found), length))
            block = max(1, _COPIED_ROWS_BYTES // length)
            for start in range(0, len(kept), block):
                rows = kept[start : start + block]
                pixels[start : start + len(rows)] = pixels[rows]
            pixels.flush()
        with open(self.temporary, "r+b") as file:
            file.truncate(len(kept) * length)
            os.fsync(file.fileno())
        return shape
