"""Dropout with a generator: masks are a function of the step, not of the global random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crmatch.distributed.process_group import SINGLE_PROCESS


class Dropout(nn.Module):
    """In training, each value becomes 0 with probability p and is divided by 1 - p otherwise.

    Masks are drawn only inside `dropout_from`; outside of it, and in eval mode, values pass unchanged.
    Distributed: every rank draws the masks of all rows and applies those of its own rows.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.generator: torch.Generator | None = None
        self.processes = SINGLE_PROCESS

    def forward(self, values: Tensor) -> Tensor:
        """Apply dropout to `values` of any shape."""
        if not self.training or self.generator is None or not self.probability:
            return values
        rows = self.processes.sum(len(values))
        drawn = torch.rand((rows, *values.shape[1:]), generator=self.generator)[self.processes.local_rows(rows)]
        kept = drawn >= self.probability
        return values * kept.to(values.device, values.dtype).div_(1 - self.probability)


@contextmanager
def dropout_from(network: nn.Module, generator: torch.Generator | None) -> Iterator[None]:
    """Let the network's dropouts draw from `generator` (None: drop nothing) until the block ends."""
    dropouts = [module for module in network.modules() if isinstance(module, Dropout)]
    before = [dropout.generator for dropout in dropouts]
    for dropout in dropouts:
        dropout.generator = generator
    try:
        yield
    finally:
        for dropout, previous in zip(dropouts, before, strict=True):
            dropout.generator = previous
