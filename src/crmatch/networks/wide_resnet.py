"""The Wide ResNet of the MixMatch and FixMatch code base. Its weights are initialized in build.py."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.config import WideResNetConfig
from crmatch.networks.low_memory.norm_act_conv import norm_act_conv
from crmatch.networks.low_memory.recompute import GROUP, Recomputable

STEM_CHANNELS = 16


def subsample(x: Tensor, stride: int) -> Tensor:
    """Every `stride`-th pixel of x (N, C, H, W); a 1x1 convolution of it equals a strided 1x1 convolution of x.

    Shortcuts subsample first because oneDNN's strided 1x1 kernel corrupts the heap in the backward pass if a channels_last
    input has 2 to 7 channels (torch 2.13, AVX2). Pooling over single pixels keeps the memory layout of the gradient; slicing
    does not.
    """
    return x if stride == 1 else F.avg_pool2d(x, kernel_size=1, stride=stride)


class Block(nn.Module):
    """Pre-activation block: skip(x) + conv2(act(norm2(conv1(act(norm1(x)))))); see __init__ for two exceptions."""

    lean = False
    """Set by `Network.save_memory`: store one feature map per norm, activation and convolution instead of two (CPU only)."""

    def __init__(
        self, config: WideResNetConfig, in_channels: int, out_channels: int, stride: int, is_first_block: bool
    ) -> None:
        super().__init__()
        bias = config.conv_bias == "all"
        self.leaky_slope = config.slope
        # In the first block of the network the skip connection starts after norm1 and activation instead of before.
        self.activate_before_skip = is_first_block
        # USB's block applies conv1 without norm1 if the width changes; norm1 still exists so that parameter counts agree.
        self.omit_norm1 = config.block == "usb" and in_channels != out_channels and not is_first_block
        self.norm1 = nn.BatchNorm2d(in_channels, config.block_norm_epsilon, config.norm_momentum)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=bias)
        self.norm2 = nn.BatchNorm2d(out_channels, config.block_norm_epsilon, config.norm_momentum)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=bias)
        self.stride = stride
        changes_shape = in_channels != out_channels or stride != 1
        # Its stride is in forward, see `subsample`.
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1, bias=bias) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) -> (N, out_channels, h / stride, w / stride)."""
        if self.activate_before_skip:
            x = F.leaky_relu(self.norm1(x), self.leaky_slope, inplace=True)
        if self.activate_before_skip or self.omit_norm1:
            inner = self.conv1(x)
        else:
            inner = norm_act_conv(x, self.norm1, self.leaky_slope, self.conv1, lean=self.lean)
        skip = x if self.shortcut is None else self.shortcut(subsample(x, self.stride))
        return norm_act_conv(inner, self.norm2, self.leaky_slope, self.conv2, skip=skip, lean=self.lean)


class WideResNet(Recomputable):
    """Stem, `scales` stages of `repeat` blocks, final norm and activation; returns the feature map, point (a) of Figure 2."""

    def __init__(self, config: WideResNetConfig, channels: int) -> None:
        super().__init__()
        self.leaky_slope = config.slope
        self.stem = nn.Conv2d(channels, STEM_CHANNELS, 3, padding=1, bias=config.conv_bias != "none")
        blocks: list[nn.Module] = []
        width_before = STEM_CHANNELS
        for stage in range(config.scales):
            width = config.filters * 2**stage
            for index in range(config.repeat):
                stride = 1
                if index == 0:
                    stride = config.first_stride if stage == 0 else 2
                blocks.append(Block(config, width_before, width, stride, is_first_block=not blocks))
                width_before = width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(width_before, config.norm_epsilon, config.norm_momentum)

    def forward(self, images: Tensor) -> Tensor:
        """Feature map (N, D, h, w) of normalized images (N, C, H, W)."""
        x = self.run_blocks([self.stem, *self.blocks], 1 + GROUP, images)  # first group: the stem and GROUP blocks
        return F.leaky_relu(self.norm(x), self.leaky_slope, inplace=True)
