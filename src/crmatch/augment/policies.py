"""Strong policies make the strong views of a run. All randomness is drawn first and applied afterwards."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from crmatch.augment.ctaugment import CTAugment
from crmatch.augment.randaugment import RandAugment


class Policy(Protocol):
    """Strong augmentation of uint8 images."""

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Any:
        """Draw all randomness for `count` images, as a tuple of tensors with that leading dimension."""

    def apply(self, images: Tensor, draws: Any) -> Tensor:
        """Augment uint8 (N, C, H, W); a pure function."""


LearningPolicy = CTAugment
"""The policy that learns from labeled probes and has state for checkpoints."""


def build_policy(name: str, variant: str, cutout: bool, geometry: bool) -> Policy:
    """Build `ctaugment`, or `randaugment` in one of its variants; see these classes for `cutout` and `geometry`."""
    if name == "ctaugment":
        return CTAugment(final_cutout=cutout, geometry=geometry)
    return RandAugment(variant, final_cutout=cutout, geometry=geometry)
