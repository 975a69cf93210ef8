"""Index batches as a pure function of (seed, stream, step).

A stream is a concatenation of seeded permutations of 0..size-1; step t takes positions t*B .. (t+1)*B - 1 of it. So every
image is used equally often, a batch may span two permutations, and any step can be asked for without the ones before.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from crmatch.randomness import generator


def batch_positions(size: int, batch_size: int, seed: int, stream: str, step: int) -> Tensor:
    """Positions in a pool of `size` images that make up the batch of `step`: int64 (batch_size,)."""
    first, last = step * batch_size, (step + 1) * batch_size
    parts = []
    for epoch in range(first // size, (last - 1) // size + 1):
        order = _permutation(size, seed, stream, epoch)
        parts.append(order[max(first - epoch * size, 0) : min(last - epoch * size, size)])
    return torch.cat(parts)


@lru_cache(maxsize=16)
def _permutation(size: int, seed: int, stream: str, epoch: int) -> Tensor:
    return torch.randperm(size, generator=generator(seed, stream, epoch))
