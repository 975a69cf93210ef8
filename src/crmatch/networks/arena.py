"""Memory for the large tensors of a training step, kept from step to step without gaps.

A step makes the same tensors as the one before. Given back to the system they cost a page fault for every 4 KiB of the next
step; kept by glibc they leave gaps, because it asks for 96 bytes more than an aligned block needs, and small objects take what
was left over. Here they lie page by page in one reserved range of addresses, of which only what was ever used takes memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from bisect import insort
from collections import deque
from functools import cache

import torch
from torch import Tensor

LEAST_BYTES = 2**20
"""Smaller tensors are left to torch."""
NOT_RESERVED = 0x4000
"""Linux's MAP_NORESERVE, which Python has no name for: addresses that are not used do not count as memory, nor when forking."""


class Arena:
    """Blocks of one range of `size` addresses, each where it fits first."""

    def __init__(self, size: int) -> None:
        self._range = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NOT_RESERVED)
        self._free = [(0, size)]
        """Start and length of what is free, by start."""
        self._returned: deque[tuple[int, int]] = deque()
        """Blocks whose tensors are gone, by whichever thread and at whatever moment; they are taken in by the next request."""
        self._lock = threading.Lock()

    def take(self, count: int) -> memoryview | None:
        """`count` bytes until nothing refers to them any more; None if there is no room."""
        length = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._take_back()
            place = next((place for place, (_, free) in enumerate(self._free) if free >= length), None)
            if place is None:
                return None
            start, free = self._free[place]
            self._free[place : place + 1] = [(start + length, free - length)] if free > length else []
        block = memoryview(self._range)[start : start + count]
        weakref.finalize(block, self._returned.append, (start, length)).atexit = False
        return block

    def _take_back(self) -> None:
        """Returned blocks become free, joined with free neighbours."""
        while self._returned:
            insort(self._free, self._returned.popleft())
            joined = self._free[:1]
            for start, length in self._free[1:]:
                if sum(joined[-1]) == start:
                    joined[-1] = (joined[-1][0], joined[-1][1] + length)
                else:
                    joined.append((start, length))
            self._free = joined


def empty_rows(count: int, row: Tensor) -> Tensor:
    """An uninitialized channels_last tensor (count, C, h, w) for rows like `row` (C, h, w)."""
    size = (count, *row.shape)
    length = count * row.numel() * row.element_size()
    arena = _arena() if length >= LEAST_BYTES else None
    block = None if arena is None else arena.take(length)
    if block is None:
        return torch.empty(size, dtype=row.dtype, memory_format=torch.channels_last)
    channels, _, width = row.shape
    storage = torch.frombuffer(block, dtype=row.dtype).untyped_storage()
    return torch.empty(0, dtype=row.dtype).set_(storage, 0, size, (row.numel(), 1, width * channels, channels))


@cache
def _arena() -> Arena | None:
    """As many addresses as the machine has memory; None where the system does not give them, and off Linux."""
    if sys.platform != "linux":
        return None
    try:
        return Arena(os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)
    except (OSError, ValueError):
        return None
