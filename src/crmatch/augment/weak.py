"""Color jitter with torchvision's definition: brightness, contrast, saturation and hue in a random order per image.

Weak augmentation: a crop moved by a few pixels and, where the data allow it, a mirror image half of the time.

Two methods add to it on mini-ImageNet: a small rotation, or jittered colors.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from crmatch.augment.kernels.geometry import crop_and_mirror
from crmatch.augment.operations import OPERATION_NAMES, apply_operation, apply_sequence, check_draws, check_images

_POSITIONS = torch.tensor([OPERATION_NAMES.index(name) for name in ("brightness", "contrast", "color", "hue")])


class JitterDraws(NamedTuple):
    """All randomness of N jittered images, on the CPU.

    Attributes:
        operations: int64 (N, 4), positions in `OPERATION_NAMES`, in the order of their application.
        values: float64 (N, 4), their values.
    """

    operations: Tensor
    values: Tensor


class ColorJitter:
    """``ColorJitter(brightness, contrast, saturation, hue)``: factors in 1 - x..1 + x, hue shifts in -x..x."""

    def __init__(self, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4, hue: float = 0.1) -> None:
        """Set the reach of the four draws: three from 0 to 1, `hue` from 0 to 0.5."""
        reach = torch.tensor([brightness, contrast, saturation, hue], dtype=torch.float64)
        if bool((reach < 0).any() or (reach > torch.tensor([1.0, 1.0, 1.0, 0.5])).any()):
            raise ValueError(f"color jitter takes 0 to 1 three times and a hue of 0 to 0.5, got {reach.tolist()}")
        self._reach = reach

    def draw(self, count: int, generator: torch.Generator) -> JitterDraws:
        """Draw the values and the order of `count` images."""
        strengths = torch.rand(count, 4, generator=generator, dtype=torch.float64) * 2 - 1
        order = torch.rand(count, 4, generator=generator, dtype=torch.float32).argsort(dim=1)
        values = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64) + self._reach * strengths
        return JitterDraws(_POSITIONS[order], values.gather(1, order))

    def apply(self, images: Tensor, draws: JitterDraws) -> Tensor:
        """Jittered uint8 (N, C, H, W)."""
        check_images(images)
        check_draws(draws.operations, images)
        return apply_sequence(images, draws.operations, draws.values)


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
