"""Weak augmentation: a crop moved by a few pixels and, if the data allow it, a mirror image half of the time.

On mini-ImageNet two methods add a small rotation or color jitter.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from crmatch.augment.kernels.geometry import crop_and_mirror
from crmatch.augment.operations import OPERATION_NAMES, apply_operation, apply_sequence

_POSITIONS = torch.tensor([OPERATION_NAMES.index(name) for name in ("brightness", "contrast", "color", "hue")])


class JitterDraws(NamedTuple):
    """All randomness of N jittered images, on the CPU."""

    operations: Tensor  # int64 (N, 4), positions in `OPERATION_NAMES`, in the order of their application
    values: Tensor  # float64 (N, 4), their values


class ColorJitter:
    """torchvision's ``ColorJitter``: factors in 1 - x..1 + x and hue shifts in -x..x, in a random order per image."""

    def __init__(self, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4, hue: float = 0.1) -> None:
        """Set x of each operation: three from 0 to 1, `hue` from 0 to 0.5."""
        self._reach = torch.tensor([brightness, contrast, saturation, hue], dtype=torch.float64)

    def draw(self, count: int, generator: torch.Generator) -> JitterDraws:
        """Draw the values and the order of `count` images."""
        strengths = torch.rand(count, 4, generator=generator, dtype=torch.float64) * 2 - 1
        order = torch.rand(count, 4, generator=generator, dtype=torch.float32).argsort(dim=1)
        values = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64) + self._reach * strengths
        return JitterDraws(_POSITIONS[order], values.gather(1, order))

    def apply(self, images: Tensor, draws: JitterDraws) -> Tensor:
        """Jitter uint8 (N, C, H, W)."""
        return apply_sequence(images, draws.operations, draws.values)


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
        jitter = ColorJitter()
        views = jitter.apply(views, rows_of(jitter.draw(count, generator), rows))
    return views


def rows_of(draws: _Draws, rows: slice) -> _Draws:
    """Select rows of draws, a named tuple of tensors with one row per image."""
    return type(draws)(*(part[rows] for part in draws))
