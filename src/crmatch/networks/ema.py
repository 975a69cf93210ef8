"""The exponential moving average (EMA) of a network's weights."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor

from crmatch.networks.network import Network, RunningState


class MovingAverage:
    """theta' <- d * theta' + (1 - d) * theta for parameters; buffers are copied, never averaged.

    Method state (`RunningState`) is shared by reference with the student, neither averaged nor copied.
    With `warmup`, d is min(decay, (1 + t) / (10 + t)) at step t, so that the initial weights do not dominate a short run; with
    "mean" it is min(decay, 1 - 1 / (t + 1)), which starts as the plain mean of the weights after every step.
    """

    def __init__(self, network: Network, decay: float, warmup: bool | Literal["mean"]) -> None:
        self.network: Network = copy.deepcopy(network)
        self.network.requires_grad_(False)
        for name, head in network.heads.items():
            if isinstance(head, RunningState):
                self.network.heads[name] = head
        self.decay = decay
        self.warmup = warmup
        self._averaged: list[Tensor] = list(self.network.parameters())
        self._copied = list(self.network.buffers())
        self.shared = frozenset(name for name, mine in self.network.named_buffers() if mine is network.get_buffer(name))
        """Names of the buffers that are shared with the student."""

    @torch.no_grad()
    def update(self, source: Network, step: int) -> None:
        """Average in the weights of `source` after `step` (from 0)."""
        rising = step / (step + 1) if self.warmup == "mean" else (1 + step) / (10 + step)
        decay = min(self.decay, rising) if self.warmup else self.decay
        current: list[Tensor] = [parameter.detach() for parameter in source.parameters()]
        torch._foreach_lerp_(self._averaged, current, 1 - decay)
        buffers = [pair for pair in zip(self._copied, source.buffers(), strict=True) if pair[0] is not pair[1]]
        torch._foreach_copy_([mine for mine, _ in buffers], [theirs for _, theirs in buffers])
