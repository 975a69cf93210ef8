"""Weight normalization (Salimans and Kingma, NIPS 2016): w = gain * v / |v|, a length and a direction per output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def normalized(weight: Tensor, gain: Tensor) -> Tensor:
    """gain_o * v_o / |v_o| for each output o: weight (O, ...), gain (O,)."""
    scale: Tensor = gain / torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return weight * scale.reshape(-1, *[1] * (weight.ndim - 1))


class NormedConv2d(nn.Conv2d):
    """A convolution with normalized kernels; `weight` holds the directions."""

    def __init__(self, *arguments: Any, **choices: Any) -> None:
        super().__init__(*arguments, **choices)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """The convolution of (N, C, H, W)."""
        outputs: Tensor = self._conv_forward(inputs, normalized(self.weight, self.gain), self.bias)
        return outputs


class NormedLinear(nn.Linear):
    """A linear layer with normalized rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, inputs) -> (N, outputs)."""
        return nn.functional.linear(inputs, normalized(self.weight, self.gain), self.bias)


@torch.no_grad()
def set_gains(module: nn.Module) -> None:
    """Begin with the lengths that the initialized weights have, so that the network starts as the plain one does."""
    for part in module.modules():
        if isinstance(part, NormedConv2d | NormedLinear):
            part.gain.copy_(torch.linalg.vector_norm(part.weight.flatten(1), dim=1))
