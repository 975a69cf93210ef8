"""The transformations of the equivariance probe: torchvision's definitions on batches, every pixel as Pillow has it.

Draw first, then apply; nearest neighbors and black outside, as torchvision's defaults.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from crmatch.augment.geometry import slide
from crmatch.augment.jitter import ColorJitter
from crmatch.augment.operations import apply_operation, check_images

LARGEST_MOVE = 0.3
SCALES = (0.5, 0.9)
LARGEST_ANGLE = 30.0


def translated(images: Tensor, randomness: torch.Generator) -> Tensor:
    """``RandomAffine(0, translate=(.3, .3))``: moved by whole pixels, round(uniform(-.3 side, .3 side)) along each axis."""
    check_images(images)
    height, width = images.shape[2:]
    reach = torch.tensor([LARGEST_MOVE * width, LARGEST_MOVE * height], dtype=torch.float64)
    moves = (_uniform(2 * len(images), -1, 1, randomness).view(-1, 2) * reach).round().long().numpy()
    rows = np.arange(height) - moves[:, 1:]
    return slide(images.contiguous(), rows, np.broadcast_to(-moves[:, :1], rows.shape).copy())


def scaled(images: Tensor, randomness: torch.Generator) -> Tensor:
    """``RandomAffine(0, scale=(.5, .9))``: shrunk around the center."""
    return apply_operation("scale", images, _uniform(len(images), *SCALES, randomness))


def rotated(images: Tensor, randomness: torch.Generator) -> Tensor:
    """``RandomRotation(30)``: turned by uniform(-30, 30) degrees around the center."""
    return apply_operation("rotate", images, _uniform(len(images), -LARGEST_ANGLE, LARGEST_ANGLE, randomness))


def jittered(images: Tensor, randomness: torch.Generator) -> Tensor:
    """``ColorJitter(.4, .4, .4, .1)``: brightness, contrast, saturation and hue in random order."""
    jitter = ColorJitter()
    return jitter.apply(images, jitter.draw(len(images), randomness))


TRANSFORMATIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "translation": translated,
    "scaling": scaled,
    "rotation": rotated,
    "color jitter": jittered,
}


def _uniform(count: int, low: float, high: float, randomness: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=randomness, dtype=torch.float64)
