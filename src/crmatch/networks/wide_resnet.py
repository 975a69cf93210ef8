"""The Wide ResNet of the MixMatch and FixMatch code base (spec section 1.1)."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.config import WideResNetConfig
from crmatch.networks.fork import forked
from crmatch.networks.low_memory.norm_act_conv import activated, convolved, convolved_as_is
from crmatch.networks.low_memory.recompute import GROUP, Recomputing

STEM_CHANNELS = 16


class Block(nn.Module):
    """One residual block: x + conv(act(norm(conv(act(norm(x)))))), pre-activation."""

    def __init__(self, config: WideResNetConfig, channels: int, width: int, stride: int, first: bool) -> None:
        super().__init__()
        bias = config.conv_bias == "all"
        self.slope = config.slope
        self.activate_before_residual = first
        """Only the very first block of the network adds its activated input."""
        self.raw_input = config.block == "usb" and channels != width and not first
        """USB's block leaves `norm1` unused there; it stays a parameter so that counts agree."""
        self.norm1 = nn.BatchNorm2d(channels, config.block_norm_epsilon, config.norm_momentum)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=bias)
        self.norm2 = nn.BatchNorm2d(width, config.block_norm_epsilon, config.norm_momentum)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.stride = stride
        self.shortcut = nn.Conv2d(channels, width, 1, bias=bias) if channels != width else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, h, w) -> (N, width, h', w')."""
        if self.activate_before_residual:
            x = activated(x, self.norm1, self.slope)
        x, carried = forked(x, self.stride)
        convolves_as_is = self.activate_before_residual or self.raw_input
        inner = convolved_as_is(x, self.conv1) if convolves_as_is else convolved(x, self.norm1, self.slope, self.conv1)
        if self.shortcut is not None:
            carried = convolved_as_is(carried, self.shortcut, x, self.stride)
        return convolved(inner, self.norm2, self.slope, self.conv2, carried)


class WideResNet(Recomputing):
    """Stem, `scales` stages of `repeat` blocks, final norm and activation; returns the feature map, point (a)."""

    def __init__(self, config: WideResNetConfig, channels: int) -> None:
        super().__init__()
        self.slope = config.slope
        self.stem = nn.Conv2d(channels, STEM_CHANNELS, 3, padding=1, bias=config.conv_bias != "none")
        blocks: list[nn.Module] = []
        before = STEM_CHANNELS
        for stage in range(config.scales):
            width = config.filters * 2**stage
            for index in range(config.repeat):
                stride = 1 if index else (2 if stage else config.first_stride)
                blocks.append(Block(config, before, width, stride, first=not blocks))
                before = width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(before, config.norm_epsilon, config.norm_momentum)
        self.out_channels = before
        self.halvings = config.scales - 1 + (config.first_stride == 2)

    def forward(self, images: Tensor) -> Tensor:
        """Feature map (N, D, h, w) of normalized images (N, C, H, W)."""
        return F.leaky_relu(self.norm(self.chain([self.stem, *self.blocks], 1 + GROUP, images)), self.slope, inplace=True)
