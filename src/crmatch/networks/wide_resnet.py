"""The Wide ResNet of the MixMatch and FixMatch code base."""

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
    """Pre-activation residual block: shortcut(x) + conv2(act(norm2(conv1(act(norm1(x))))))."""

    lean = False
    """Whether norm, activation and convolution are fused to save memory; see low_memory/."""

    def __init__(self, config: WideResNetConfig, channels: int, width: int, stride: int, first: bool) -> None:
        super().__init__()
        bias = config.conv_bias == "all"
        self.slope = config.slope
        # In the first block of the network the residual branches off after norm1 and activation instead of before.
        self.activate_before_residual = first
        # USB's block does not use norm1 where the width changes; it stays a parameter so that parameter counts agree.
        self.skip_norm1 = config.block == "usb" and channels != width and not first
        self.norm1 = nn.BatchNorm2d(channels, config.block_norm_epsilon, config.norm_momentum)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=bias)
        self.norm2 = nn.BatchNorm2d(width, config.block_norm_epsilon, config.norm_momentum)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=bias)
        self.stride = stride
        self.shortcut = nn.Conv2d(channels, width, 1, bias=bias) if channels != width else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, h, w) -> (N, width, h / stride, w / stride)."""
        if self.activate_before_residual:
            x = F.leaky_relu(self.norm1(x), self.slope, inplace=True)
        if self.activate_before_residual or self.skip_norm1:
            inner = self.conv1(x)
        else:
            inner = norm_act_conv(x, self.norm1, self.slope, self.conv1, lean=self.lean)
        residual = x if self.shortcut is None else self.shortcut(subsample(x, self.stride))
        return norm_act_conv(inner, self.norm2, self.slope, self.conv2, residual, lean=self.lean)


class WideResNet(Recomputable):
    """Stem, `scales` stages of `repeat` blocks, final norm and activation; returns the feature map, point (a) of Figure 2."""

    def __init__(self, config: WideResNetConfig, channels: int) -> None:
        super().__init__()
        self.slope = config.slope
        self.stem = nn.Conv2d(channels, STEM_CHANNELS, 3, padding=1, bias=config.conv_bias != "none")
        blocks: list[nn.Module] = []
        width_before = STEM_CHANNELS
        for stage in range(config.scales):
            width = config.filters * 2**stage
            for index in range(config.repeat):
                stride = 1 if index else (2 if stage else config.first_stride)
                blocks.append(Block(config, width_before, width, stride, first=not blocks))
                width_before = width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(width_before, config.norm_epsilon, config.norm_momentum)

    def forward(self, images: Tensor) -> Tensor:
        """Feature map (N, D, h, w) of normalized images (N, C, H, W)."""
        x = self.run_blocks([self.stem, *self.blocks], 1 + GROUP, images)
        return F.leaky_relu(self.norm(x), self.slope, inplace=True)
