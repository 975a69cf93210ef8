"""A pretrained backbone: any network that returns a feature map and pooled features, with standardized pooled features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.config import PretrainedConfig

FEATURE_LENGTH = 16.0
"""Length of standardized features. With it, one learning rate fits the heads of all backbones."""


class Body(NamedTuple):
    """A pretrained network without its classifier.

    Attributes:
        module: images (N, 3, H, W) -> feature map (N, D, h, w) and pooled features (N, P).
        architecture: JSON values from which `module` can be built again without its weights.
    """

    module: nn.Module
    architecture: dict[str, Any]


def root(features: Tensor) -> Tensor:
    """Signed square root, f / sqrt(|f| + 0.001): few large features no longer outweigh all others.

    The constant keeps the gradient finite at f = 0. As in few-shot classification with a frozen network (Hu et al., 2021).
    """
    return features * torch.rsqrt(features.abs() + 1e-3)


def standardize(features: Tensor, center: Tensor) -> Tensor:
    """16 (g - center) / |g - center| with g = root(f), for features f (N, P); `center` (P,) is the mean of g over images."""
    return FEATURE_LENGTH * F.normalize(root(features) - center, dim=1)


class PretrainedBackbone(nn.Module):
    """Feature map (a) and standardized pooled features (b) of a pretrained network."""

    center: Tensor

    def __init__(self, body: Body, config: PretrainedConfig, image_size: int) -> None:
        super().__init__()
        self.body = body.module
        self.architecture = body.architecture
        self.freeze_norm = config.freeze_norm
        parameters = list(self.body.parameters())
        for parameter in parameters[: int(config.frozen_share * len(parameters))]:
            parameter.requires_grad_(False)  # autograd then skips these layers: they are the first ones
        with torch.no_grad():
            _, pooled = self.body.eval()(torch.zeros(1, 3, image_size, image_size))
        self.register_buffer("center", torch.zeros(pooled.shape[1]))
        self.train()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D, h, w) and (N, P) of normalized color or gray images (N, 3 or 1, H, W)."""
        feature_map, pooled = self.body(images.expand(-1, 3, -1, -1))
        return feature_map, standardize(pooled, self.center)

    def train(self, mode: bool = True) -> PretrainedBackbone:
        """As nn.Module's, but batch norms keep their pretrained statistics if `freeze_norm`."""
        super().train(mode)
        if self.freeze_norm:
            for module in self.body.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self


class FeatureInput(nn.Module):
    """Takes the place of a frozen backbone when its features were computed before.

    Maps stored features (N, P, 1, 1) to themselves, as point (a), and to standardized features (N, P), point (b).
    """

    center: Tensor

    def __init__(self, center: Tensor) -> None:
        super().__init__()
        self.register_buffer("center", center)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """(N, P, 1, 1) -> (N, P, 1, 1) and (N, P)."""
        return features, standardize(features.flatten(start_dim=1), self.center)
