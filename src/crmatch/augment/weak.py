"""Weak augmentation: a crop moved by a few pixels and, where the data allow it, a mirror image half of the time.

Two methods add to it on mini-ImageNet: a small rotation, or jittered colors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from crmatch.augment.geometry import crop_and_mirror
from crmatch.augment.jitter import ColorJitter
from crmatch.augment.operations import apply_operation


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


def weak_views(images: Tensor, weak: WeakAugmentation, generator: torch.Generator) -> Tensor:
    """Weak views of uint8 (N, C, H, W).

    A crop of the padded image with offsets uniform in 0..2 * padding, mirrored with p = 0.5, then turned by an angle uniform
    in -rotation..rotation, then jittered, as far as `weak` says so.
    """
    count = len(images)
    offsets = torch.randint(0, 2 * weak.padding + 1, (2, count), generator=generator)
    mirrored = torch.rand(count, generator=generator) < (0.5 if weak.mirror else 0.0)
    views = crop_and_mirror(images, offsets[0], offsets[1], mirrored, weak.padding, weak.padding_mode)
    if weak.rotation:
        turns = torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1
        views = apply_operation("rotate", views, turns * weak.rotation)
    if weak.jitter:
        jitter = ColorJitter()
        views = jitter.apply(views, jitter.draw(count, generator))
    return views
