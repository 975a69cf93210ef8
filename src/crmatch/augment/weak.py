"""Weak augmentation: a crop moved by a few pixels and, if the data allow it, a mirror image half of the time.

On mini-ImageNet two methods add a small rotation or color jitter.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from crmatch.augment.kernels.geometry import crop_and_mirror
from crmatch.augment.operations import OPERATION_NAMES, apply_operation, apply_sequence

_JITTER = torch.tensor([OPERATION_NAMES.index(name) for name in ("brightness", "contrast", "color", "hue")])


class JitterDraws(NamedTuple):
    """All randomness of N jittered images, on the CPU; `apply_sequence(images, *draws)` jitters them."""

    operations: Tensor  # int64 (N, 4), positions in `OPERATION_NAMES`, in the order of their application
    values: Tensor  # float64 (N, 4), their values


def draw_jitter(count: int, generator: torch.Generator) -> JitterDraws:
    """Draw torchvision's ``ColorJitter(0.4, 0.4, 0.4, 0.1)``: three factors in 0.6..1.4 and a hue shift in -0.1..0.1.

    Each image gets them in its own random order.
    """
    strengths = torch.rand(count, 4, generator=generator, dtype=torch.float64) * 2 - 1
    order = torch.rand(count, 4, generator=generator, dtype=torch.float32).argsort(dim=1)
    middle, reach = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.4, 0.4, 0.4, 0.1]], dtype=torch.float64)
    return JitterDraws(_JITTER[order], (middle + reach * strengths).gather(1, order))


_Draws = TypeVar("_Draws", bound=tuple[Tensor, ...])


class WeakAugmentation(NamedTuple):
    """What a weak view is made of."""

    padding: int  # how far the crop may move, in pixels
    mirror: bool  # whether half of the views are mirrored
    padding_mode: Literal["reflect", "zero"] = "reflect"  # what the crop shows beyond the image
    rotation: float = 0.0  # largest angle in degrees, in both directions; 0 means no rotation
    jitter: bool = False  # whether colors are jittered


def weak_views(images: Tensor, weak: WeakAugmentation, generator: torch.Generator, rows: slice = slice(None)) -> Tensor:
    """Make weak views of uint8 (N, C, H, W): crop, mirror, rotate, jitter.

    The offsets of the crop are uniform in 0..2 * padding, the angle is uniform in -rotation..rotation. Draws are made for all N
    images but only `rows` are rendered: a rank that renders a part of the batch gets the same pixels as a single process.
    """
    count = len(images)
    offsets = torch.randint(0, 2 * weak.padding + 1, (2, count), generator=generator)[:, rows]
    mirrored = (torch.rand(count, generator=generator) < (0.5 if weak.mirror else 0.0))[rows]
    views = crop_and_mirror(images[rows], offsets[0], offsets[1], mirrored, weak.padding, weak.padding_mode)
    if weak.rotation:
        turns = torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1
        views = apply_operation("rotate", views, turns[rows] * weak.rotation)
    if weak.jitter:
        views = apply_sequence(views, *rows_of(draw_jitter(count, generator), rows))
    return views


def rows_of(draws: _Draws, rows: slice) -> _Draws:
    """Select rows of draws, a named tuple of tensors with one row per image."""
    return type(draws)(*(part[rows] for part in draws))
