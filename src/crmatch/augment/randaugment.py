"""RandAugment: a few random operations per image with random strength, then CutOut; in five published variants."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.augment.cutout import cut_out, draw_boxes
from crmatch.augment.operations import OPERATION_NAMES, OPERATIONS, apply_each, check_images
from crmatch.augment.variants import HIGHEST_LEVEL, LEVEL_SCALE, RANDAUGMENT_OPERATIONS, VARIANTS, Magnitude

_IDENTITY = OPERATION_NAMES.index("identity")


class Draws(NamedTuple):
    """All randomness of N strong views, on the CPU.

    Attributes:
        operations: int64 (N, num_ops), positions in `OPERATION_NAMES`.
        values: float64 (N, num_ops), in the operations' units.
        applied: bool (N, num_ops), which of them are carried out.
        boxes: int64 (N, 4), the box of the final CutOut: first row, first column, end row, end column.
    """

    operations: Tensor
    values: Tensor
    applied: Tensor
    boxes: Tensor


class RandAugment:
    """The strong policy of the paper and of the FixMatch family.

    Args:
        variant: a key of `VARIANTS`.
    """

    def __init__(self, variant: str = "paper") -> None:
        if variant not in VARIANTS:
            raise ValueError(f"unknown RandAugment variant {variant!r}; known: {', '.join(VARIANTS)}")
        self.variant = VARIANTS[variant]
        self._pool = torch.tensor([OPERATION_NAMES.index(name) for name in RANDAUGMENT_OPERATIONS])
        self._signed = torch.tensor([OPERATIONS[name].signed and self.variant.signed for name in RANDAUGMENT_OPERATIONS])
        self._magnitudes = [self.variant.magnitudes.get(name, Magnitude(0, 0)) for name in RANDAUGMENT_OPERATIONS]

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Draws:
        """Draw operations, values and boxes for `count` images of `height` x `width` pixels."""
        variant = self.variant
        shape = (count, variant.num_ops)
        choice = torch.randint(len(self._pool), shape, generator=generator)
        applied = torch.rand(shape, generator=generator) < variant.apply_probability
        if variant.strength == "level":
            levels = torch.randint(1, HIGHEST_LEVEL + 1, shape, generator=generator).double()
            scale = LEVEL_SCALE
        else:
            levels = torch.rand(shape, generator=generator, dtype=torch.float64)
            scale = 1
        negative = torch.rand(shape, generator=generator) < 0.5
        values = self._values(choice, levels, scale, height, width)
        values = torch.where(negative & self._signed[choice], -values, values)
        boxes = draw_boxes(variant.cutout, count, height, width, generator)
        return Draws(self._pool[choice], values, applied, boxes)

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """The strong views of `images`: uint8 (N, C, H, W) to the same."""
        check_images(images)
        operations = torch.where(draws.applied, draws.operations, _IDENTITY)
        views = images
        for step in range(operations.shape[1]):
            views = apply_each(views, operations[:, step], draws.values[:, step])
        return cut_out(views, draws.boxes, self.variant.cutout.color)

    def _values(self, choice: Tensor, levels: Tensor, scale: int, height: int, width: int) -> Tensor:
        values = torch.zeros_like(levels)
        for position, (name, magnitude) in enumerate(zip(RANDAUGMENT_OPERATIONS, self._magnitudes, strict=True)):
            side = {"translate_x": width, "translate_y": height}.get(name, 1)
            moved = levels * magnitude.span / scale
            if magnitude.unit == "whole_pixels":
                moved = moved * side
            if magnitude.rounding == "truncate":
                moved = moved.trunc()
            elif magnitude.rounding == "nearest":
                moved = moved.round()
            if magnitude.unit != "value":
                moved = moved / side
            values = torch.where(choice == position, magnitude.start + moved, values)
        return values
