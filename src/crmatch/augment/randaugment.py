"""RandAugment: a few random operations per image with random strength, then CutOut; in six published variants."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.augment.cutout import GRAY, cut_out_, draw_boxes
from crmatch.augment.magnitudes import MagnitudeTable
from crmatch.augment.operations import OPERATION_NAMES, OPERATIONS, apply_sequence, check_draws, check_images
from crmatch.augment.variants import GEOMETRIC, HIGHEST_LEVEL, LEVEL_SCALE, VARIANTS

_IDENTITY = OPERATION_NAMES.index("identity")
_WARPS = torch.tensor([operation.family in ("warp", "slide") for operation in OPERATIONS.values()])
_KEEP_ALPHA = torch.tensor([operation.family in ("", "warp", "slide", "enhance") for operation in OPERATIONS.values()])


class Draws(NamedTuple):
    """All randomness of N strong views, on the CPU.

    Attributes:
        operations: int64 (N, num_ops), positions in `OPERATION_NAMES`.
        values: float64 (N, num_ops), in the operations' units.
        applied: bool (N, num_ops), which of them are carried out.
        boxes: int64 (N, 4), the box of the final CutOut.
    """

    operations: Tensor
    values: Tensor
    applied: Tensor
    boxes: Tensor


class RandAugment:
    """The strong policy of the paper and of the FixMatch family."""

    def __init__(self, variant: str = "paper", final_cutout: bool = True, geometry: bool = True) -> None:
        """Build the policy.

        Args:
            variant: a key of `VARIANTS`.
            final_cutout: keeps or drops the square at the end.
            geometry: keeps or drops the operations that move pixels.
        """
        if variant not in VARIANTS:
            raise ValueError(f"unknown RandAugment variant {variant!r}; known: {', '.join(VARIANTS)}")
        self.variant = VARIANTS[variant]
        self.final_cutout = final_cutout
        names = [name for name in self.variant.operations if geometry or name not in GEOMETRIC]
        self._magnitudes = MagnitudeTable(names, self.variant.magnitudes)
        self._pool = torch.tensor([OPERATION_NAMES.index(name) for name in names])
        self._signed = torch.tensor([OPERATIONS[name].signed for name in names])

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Draws:
        """Draw operations, values and boxes for `count` images of `height` x `width` pixels."""
        variant = self.variant
        shape = (count, variant.num_ops)
        choice = torch.randint(len(self._pool), shape, generator=generator)
        applied = torch.rand(shape, generator=generator, dtype=torch.float32) < variant.apply_probability
        if variant.strength == "level":
            levels = torch.randint(1, HIGHEST_LEVEL + 1, shape, generator=generator)
            values = self._magnitudes.values(choice, levels.double(), height, width, scale=LEVEL_SCALE)
        else:
            strengths = torch.rand(shape, generator=generator, dtype=torch.float64)
            values = self._magnitudes.values(choice, strengths, height, width)
        if variant.signed:
            negative = torch.rand(shape, generator=generator, dtype=torch.float32) < 0.5
            values = torch.where(negative & self._signed[choice], -values, values)
        boxes = draw_boxes(variant.cutout, count, height, width, generator)
        return Draws(self._pool[choice], values, applied, boxes)

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """The strong views of `images`: uint8 (N, C, H, W) to the same, contiguous."""
        check_images(images)
        check_draws(draws.operations, images)
        operations = torch.where(draws.applied, draws.operations, _IDENTITY).cpu()
        views = apply_sequence(images, operations, draws.values)
        if self.variant.gray_fill:
            views = self._fill_gray(views, operations, draws.values)
        return cut_out_(views, draws.boxes, self.variant.cutout.color) if self.final_cutout else views

    @staticmethod
    def _fill_gray(views: Tensor, operations: Tensor, values: Tensor) -> Tensor:
        """Gray where a warp uncovered the outside, unless a later operation made it opaque.

        Google's code works on RGBA images: warps uncover transparent black, the enhancers (brightness, color, contrast,
        sharpness) keep the alpha channel, autocontrast, equalize, posterize and solarize drop it, and what is still
        transparent at the end becomes gray. So the alpha channel sees the warps after the last operation that drops it.
        Its gray is 127.5, of which a byte keeps 127.
        """
        dropped_later = (~_KEEP_ALPHA[operations]).flip(1).cumsum(1).flip(1) > 0
        seen = torch.where(_WARPS[operations] & ~dropped_later, operations, _IDENTITY)
        opaque = torch.full_like(views[:, :1], 255, memory_format=torch.contiguous_format)
        alpha = apply_sequence(opaque, seen, values)
        return (views & alpha).bitwise_or_(~alpha & GRAY[0])
