"""Weak augmentation: a crop moved by a few pixels and, where the data allow it, a mirror image half of the time.

Two methods add to it on mini-ImageNet: a small rotation, or jittered colors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from crmatch.augment.geometry import crop_and_mirror
from crmatch.augment.jitter import ColorJitter
from crmatch.augment.operations import apply_operation

Draws = TypeVar("Draws", bound=tuple[Tensor, ...])


class WeakAugmentation(NamedTuple):
    """What a weak view is made of.

    Attributes:
        padding: how far the crop may move, in pixels.
        mirror: whether the view may be mirrored.
        padding_mode: what the crop shows beyond the image.
        rotation: degrees by which the view may be turned either way; 0: never.
        jitter: whether colors are jittered.
    """

    padding: int
    mirror: bool
    padding_mode: Literal["reflect", "zero"] = "reflect"
    rotation: float = 0.0
    jitter: bool = False


def weak_views(images: Tensor, weak: WeakAugmentation, generator: torch.Generator, rows: slice = slice(None)) -> Tensor:
    """Weak views of uint8 (N, C, H, W); of those `rows` alone, which get the views that they have among all.

    A crop of the padded image with offsets uniform in 0..2 * padding, mirrored with p = 0.5, then turned by an angle uniform
    in -rotation..rotation, then jittered, as far as `weak` says so.
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


def rows_of(draws: Draws, rows: slice) -> Draws:
    """Some rows of draws, which are a named tuple of tensors with one row per image."""
    return type(draws)(*(part[rows] for part in draws))
