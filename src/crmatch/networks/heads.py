"""Heads that are used in training only (spec section 1.3)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

ROTATIONS = 4


def projection_head(inputs: int, width: int, kind: Literal["linear", "mlp"]) -> nn.Module:
    """Z of Eq. (2): one linear layer, or two with a ReLU between them whose hidden width is `width`."""
    if kind == "linear":
        return nn.Linear(inputs, width)
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width))


class RunningState(nn.Module):
    """What a method remembers from step to step: buffers without a function, so that checkpoints hold them."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, value)


def linear_head(inputs: int, outputs: int) -> nn.Module:
    """One linear layer on the pooled features: ReMixMatch's rotation head, Mean Teacher's second classifier."""
    return nn.Linear(inputs, outputs)


def rotation_head(features: int) -> nn.Module:
    """H of Eq. (7): Linear, ReLU, Linear from the pooled features to the four rotations."""
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, ROTATIONS))
