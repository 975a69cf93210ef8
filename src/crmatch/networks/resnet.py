"""ResNet-18 for mini-ImageNet: post-activation blocks, 7x7 stem; optionally with PLCB's weight normalization and dropout.

Weight normalization (Salimans and Kingma, NIPS 2016): w = gain * v / |v|, a length and a direction per output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.config import ResNet18Config
from crmatch.networks.dropout import Dropout
from crmatch.networks.low_memory.recompute import GROUP, Recomputable
from crmatch.networks.wide_resnet import subsample


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
    """Set each gain to the length of its initialized kernel, so that the network starts as the plain one does."""
    for part in module.modules():
        if isinstance(part, NormedConv2d | NormedLinear):
            part.gain.copy_(torch.linalg.vector_norm(part.weight.flatten(1), dim=1))


WIDTHS = (64, 128, 256, 512)


def _convolution(config: ResNet18Config) -> type[nn.Conv2d]:
    return NormedConv2d if config.weight_norm else nn.Conv2d


class Block(nn.Module):
    """Residual block: relu(shortcut(x) + norm2(conv2(dropout(relu(norm1(conv1(x)))))))."""

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
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        inner = self.norm2(self.conv2(self.dropout(inner)))
        skip = x if self.shortcut is None else self.shortcut(subsample(x, self.stride))
        return F.relu(skip + inner, inplace=True)


class ResNet18(Recomputable):
    """Stem and four stages of two blocks; returns the feature map, point (a) of Figure 2."""

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

    def forward(self, images: Tensor) -> Tensor:
        """Feature map (N, 512, h, w) of normalized images (N, C, H, W)."""
        x = F.relu(self.norm(self.stem(images)), inplace=True)
        return self.run_blocks([*self.blocks], GROUP, F.max_pool2d(x, 3, 2, padding=1))
