"""EfficientNet-Lite 0 to 2: EfficientNet (Tan and Le, ICML 2019) with ReLU6 and without squeeze-and-excitation."""

from __future__ import annotations

import math

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.pretrained.catalog import OUT_CHANNELS, STEM_CHANNELS, efficientnet_lite_blocks


class SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding, which is asymmetric for even sizes and stride 2."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, h, w) -> (N, C', ceil(h / stride), ceil(w / stride))."""
        padding = []
        for size in (x.shape[3], x.shape[2]):  # F.pad takes the last axis first
            total = max((math.ceil(size / self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - size, 0)
            padding += [total // 2, total - total // 2]
        y: Tensor = self._conv_forward(F.pad(x, padding) if any(padding) else x, self.weight, self.bias)
        return y


def conv_norm(channels: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution and batch norm."""
    conv = SameConv2d(channels, width, kernel, stride, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width, eps=1e-3, momentum=0.01))


class Block(nn.Module):
    """Inverted residual block: project(act(depthwise(act(expand(x))))) + x, the residual only if shapes agree."""

    def __init__(self, channels: int, width: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = channels * expansion
        self.expand = conv_norm(channels, inner) if expansion > 1 else None
        self.depthwise = conv_norm(inner, inner, kernel, stride, groups=inner)
        self.project = conv_norm(inner, width)
        self.has_residual = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, h, w) -> (N, width, ceil(h / stride), ceil(w / stride))."""
        inner = x if self.expand is None else F.relu6(self.expand(x))
        inner = self.project(F.relu6(self.depthwise(inner)))
        y: Tensor = x + inner if self.has_residual else inner
        return y


class EfficientNetLite(nn.Module):
    """Stem, seven stages of inverted residual blocks, and a 1x1 convolution."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.stem = conv_norm(3, STEM_CHANNELS, 3, stride=2)
        blocks = efficientnet_lite_blocks(size)
        self.blocks = nn.Sequential(*(Block(*block) for block in blocks))
        self.top = conv_norm(blocks[-1].width, OUT_CHANNELS)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Feature map (N, 1280, H / 32, W / 32) and its mean over pixels (N, 1280), of normalized images (N, 3, H, W)."""
        feature_map = F.relu6(self.top(self.blocks(F.relu6(self.stem(images)))))
        return feature_map, feature_map.mean(dim=(2, 3))
