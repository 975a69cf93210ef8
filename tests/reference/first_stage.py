"""Batches of a supervised stage as the loaders of LP-DeepSSL and PseudoLabeling make them; imports nothing of the package."""

from __future__ import annotations


def batch_sizes(labeled, batch_size, passes):
    """Sizes of all batches: each pass takes images one by one; an incomplete batch is dropped, unless a pass has no other."""
    sizes = []
    for _ in range(passes):
        batch, complete = 0, []
        for _ in range(labeled):
            batch += 1
            if batch == batch_size:
                complete.append(batch)
                batch = 0
        sizes += complete or [batch]
    return sizes
