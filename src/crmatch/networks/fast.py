"""A shallow, wide network for minutes of training on a CPU, after the ideas of KellerJordan/cifar10-airbench.

Few wide layers use a CPU better than many narrow ones, pooling before batch norm leaves a quarter of the pixels to normalize,
and the kernels of a first layer that whitens 2x2 patches need not be learned. Its weights are initialized in build.py.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.config import FastNetConfig
from crmatch.networks.low_memory.recompute import GROUP, Recomputable

PATCH = 2
SMALLEST_VARIANCE = 5e-4
"""Is added to the variance of each component of the patches, so that noise is not amplified."""


class Block(nn.Module):
    """Convolution, 2x2 max-pooling, norm, activation; convolution, norm, activation."""

    def __init__(self, config: FastNetConfig, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels, config.norm_epsilon, config.norm_momentum)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels, config.norm_epsilon, config.norm_momentum)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) -> (N, out_channels, h // 2, w // 2); a single pixel is not pooled."""
        x = self.conv1(x)
        if min(x.shape[2:]) > 1:
            x = F.max_pool2d(x, 2)
        x = F.gelu(self.norm1(x))
        return F.gelu(self.norm2(self.conv2(x)))


class FastNet(Recomputable):
    """Whitening of 2x2 patches and three blocks; returns the feature map, point (a) of Figure 2."""

    whitening: Tensor

    def __init__(self, config: FastNetConfig, channels: int) -> None:
        super().__init__()
        components = channels * PATCH**2
        # On the CPU also in `weight_shapes`: computing with tensors without memory would import torch's compiler.
        identity = torch.eye(components, device="cpu").reshape(components, channels, PATCH, PATCH)
        self.register_buffer("whitening", torch.cat([identity, -identity]))  # not trained; set by `prepare`
        self.bias = nn.Parameter(torch.zeros(2 * components))
        widths = [2 * components, config.filters, 4 * config.filters, 4 * config.filters]
        self.blocks = nn.Sequential(*(Block(config, before, after) for before, after in itertools.pairwise(widths)))

    @torch.no_grad()
    def prepare(self, images: Tensor) -> None:
        """Set the first layer from normalized images (N, C, H, W), so that its outputs are uncorrelated, with variance 1.

        Its kernels are e_i / sqrt(v_i + 5e-4) and their negatives, for the eigenvectors e_i and eigenvalues v_i of the second
        moments of all 2x2 patches.
        """
        patches = F.unfold(images.double(), PATCH).transpose(1, 2).flatten(0, 1)  # (patches, C * 4)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        kernels = (vectors / (values + SMALLEST_VARIANCE).sqrt()).T.reshape(-1, *self.whitening.shape[1:])
        self.whitening.copy_(torch.cat([kernels, -kernels]))

    def forward(self, images: Tensor) -> Tensor:
        """Feature map (N, D, h, w) of normalized images (N, C, H, W)."""
        x = F.gelu(F.conv2d(images, self.whitening, self.bias))
        return self.run_blocks([*self.blocks], GROUP, x)
