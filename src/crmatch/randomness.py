"""All randomness of the program is a pure function of (seed, stream, step).

No generator outlives a step, and the global generators are neither read nor changed. So a resumed run needs no random state,
any step can be replayed on its own, and an additional draw in one stream does not change the others.
"""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, stream: str, step: int = 0) -> torch.Generator:
    """A new CPU generator for one named stream at one step.

    Args:
        seed: the run's seed (for splits: the number of the split).
        stream: the purpose of the numbers, e.g. ``unlabeled``, ``strong/strong``, ``init/backbone``.
        step: the training step, or the epoch for streams of permutations.
    """
    digest = hashlib.blake2b(f"{seed}|{stream}|{step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
