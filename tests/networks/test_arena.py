"""Memory of steps: blocks never overlap, come back when nothing refers to them, and the next step needs no more."""

from __future__ import annotations

import gc
import mmap
import os
import random
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from crmatch.networks import arena
from crmatch.networks.arena import Arena, empty_rows

PAGE = mmap.PAGESIZE


def test_blocks_do_not_overlap_and_are_reused_once_they_are_dropped() -> None:
    own = Arena(64 * PAGE)
    draws = random.Random(0)
    held: list[tuple[memoryview, int]] = []
    for number in range(500):
        if held and draws.random() < 0.5:
            block, mark = held.pop(draws.randrange(len(held)))
            assert bytes(block) == bytes([mark]) * len(block)
            del block
        block = own.take(draws.randrange(1, 12 * PAGE))
        if block is not None:
            mark = number % 256
            block[:] = bytes([mark]) * len(block)
            held.append((block, mark))
            del block
    for block, mark in held:
        assert bytes(block) == bytes([mark]) * len(block)
    del block
    held.clear()
    assert own.take(64 * PAGE) is not None  # all of it is one piece again


def test_threads_do_not_get_the_same_block() -> None:
    own = Arena(512 * PAGE)

    def work(mark: int) -> bool:
        draws, held = random.Random(mark), deque[memoryview](maxlen=8)
        for _ in range(300):
            block = own.take(draws.randrange(1, 4 * PAGE))
            assert block is not None
            block[:] = bytes([mark]) * len(block)
            held.append(block)
        return all(bytes(block) == bytes([mark]) * len(block) for block in held)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(before)


def test_there_is_room_or_there_is_none() -> None:
    own = Arena(4 * PAGE)
    first, second = own.take(2 * PAGE), own.take(2 * PAGE)
    assert first is not None
    assert second is not None
    assert own.take(1) is None
    del first
    assert own.take(2 * PAGE + 1) is None
    assert own.take(PAGE) is not None


def test_the_first_place_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors in the same order lie at the same addresses in every step."""
    own = Arena(256 * arena.LEAST_BYTES)
    monkeypatch.setattr(arena, "_arena", lambda: own)
    row = torch.zeros(16, 32, 32)

    def step() -> list[int]:
        kept = [empty_rows(count, row) for count in (40, 20, 30)]
        del kept[1]
        kept.append(empty_rows(18, row))
        return [tensor.data_ptr() for tensor in kept]

    first, second = step(), step()
    assert first == second
    assert first[2] == first[0] + 40 * row.numel() * 4


@pytest.mark.parametrize("count", [1, 100], ids=["torch's", "the arena's"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_channels_last_and_can_be_written(count: int, dtype: torch.dtype) -> None:
    rows = empty_rows(count, torch.zeros(16, 32, 31, dtype=dtype))
    assert rows.shape == (count, 16, 32, 31)
    assert rows.dtype == dtype
    assert rows.is_contiguous(memory_format=torch.channels_last)
    assert rows._base is None
    rows.fill_(3)
    assert rows.sum() == 3 * rows.numel()


def test_without_room_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Arena(PAGE)
    for replaced in (lambda: small, lambda: None):
        monkeypatch.setattr(arena, "_arena", replaced)
        assert empty_rows(100, torch.zeros(16, 32, 32)).shape == (100, 16, 32, 32)


def test_a_view_keeps_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Arena(16 * arena.LEAST_BYTES)
    monkeypatch.setattr(arena, "_arena", lambda: own)
    rows = empty_rows(100, torch.zeros(16, 32, 32)).fill_(1)
    part = rows[3:5]
    del rows
    gc.collect()
    other = empty_rows(100, torch.zeros(16, 32, 32)).fill_(2)
    assert part.unique().tolist() == [1.0]
    assert other.unique().tolist() == [2.0]


def test_a_process_with_an_arena_of_all_memory_can_fork() -> None:
    assert arena._arena() is not None
    pid = os.fork()
    if not pid:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
