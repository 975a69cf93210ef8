"""Weak augmentation: a crop moved by a few pixels and, where the data allow it, a mirror image half of the time."""

from __future__ import annotations

import torch
from torch import Tensor

from crmatch.augment.geometry import crop_and_mirror


def weak_views(images: Tensor, padding: int, mirror: bool, generator: torch.Generator) -> Tensor:
    """Weak views of uint8 (N, C, H, W): a reflect-padded crop with offsets uniform in 0..2 * padding, mirrored with p = 0.5."""
    offsets = torch.randint(0, 2 * padding + 1, (2, len(images)), generator=generator)
    mirrored = torch.rand(len(images), generator=generator) < (0.5 if mirror else 0.0)
    return crop_and_mirror(images, offsets[0], offsets[1], mirrored, padding)
