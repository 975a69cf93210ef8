"""Weight normalization (Salimans and Kingma, NIPS 2016): w = gain * v / |v|, a length and a direction per output.

ResNet-18 (spec section 1.2): post-activation, 7x7 stem, no small-image changes; plain, or as PLCB has it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.config import ResNet18Config
from crmatch.networks.dropout import Dropout
from crmatch.networks.fork import forked
from crmatch.networks.low_memory.recompute import GROUP, Recomputing


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


WIDTHS = (64, 128, 256, 512)


def _convolution(config: ResNet18Config) -> type[nn.Conv2d]:
    return NormedConv2d if config.weight_norm else nn.Conv2d


class Block(nn.Module):
    """act(x + norm(conv(drop(act(norm(conv(x)))))))."""

    def __init__(self, config: ResNet18Config, channels: int, width: int, stride: int) -> None:
        super().__init__()
        norm, convolution = (config.norm_epsilon, config.norm_momentum), _convolution(config)
        self.conv1 = convolution(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width, *norm)
        self.dropout = Dropout(config.dropout)
        self.conv2 = convolution(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width, *norm)
        self.shortcut: nn.Sequential | None = None
        self.stride = stride
        if stride != 1 or channels != width:
            projection = convolution(channels, width, 1, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width, *norm))

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, h, w) -> (N, width, h', w')."""
        x, carried = forked(x, self.stride)
        residual = F.relu(self.norm1(self.conv1(x)), inplace=True)
        residual = self.norm2(self.conv2(self.dropout(residual)))
        if self.shortcut is not None:
            carried = self.shortcut(carried)
        return F.relu(carried + residual, inplace=True)


class ResNet18(Recomputing):
    """Stem and four stages of two blocks; returns the feature map, point (a)."""

    def __init__(self, config: ResNet18Config, channels: int) -> None:
        super().__init__()
        self.stem = _convolution(config)(channels, WIDTHS[0], 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(WIDTHS[0], config.norm_epsilon, config.norm_momentum)
        blocks = []
        before = WIDTHS[0]
        for stage, width in enumerate(WIDTHS):
            blocks += [Block(config, before, width, 2 if stage else 1), Block(config, width, width, 1)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.out_channels = before
        self.halvings = 5

    def forward(self, images: Tensor) -> Tensor:
        """Feature map (N, 512, h, w) of normalized images (N, C, H, W)."""
        x = F.relu(self.norm(self.stem(images)), inplace=True)
        return self.chain([*self.blocks], GROUP, F.max_pool2d(x, 3, 2, padding=1))
