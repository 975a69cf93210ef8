"""RandAugment: a few random operations of random strength per image, then CutOut; in six published variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crmatch.augment.kernels.cutout import GRAY, cut_out_, draw_boxes
from crmatch.augment.operations import OPERATION_NAMES, OPERATIONS, apply_sequence
from crmatch.augment.variants import HIGHEST_LEVEL, LEVEL_SCALE, VARIANTS, Magnitude

_IDENTITY = OPERATION_NAMES.index("identity")
_GEOMETRIC = torch.tensor([operation.geometric for operation in OPERATIONS.values()])
_DROPS_ALPHA = torch.tensor([operation.drops_alpha for operation in OPERATIONS.values()])


class Draws(NamedTuple):
    """All randomness of N strong views, on the CPU."""

    operations: Tensor  # int64 (N, num_ops), positions in `OPERATION_NAMES`
    values: Tensor  # float64 (N, num_ops), in the operations' units
    applied: Tensor  # bool (N, num_ops), which of the operations are applied
    boxes: Tensor  # int64 (N, 4), the box of the final CutOut


class MagnitudeTable:
    """The magnitudes of several operations as arrays, indexed by the operation's position in `names`."""

    def __init__(self, names: Sequence[str], magnitudes: Mapping[str, Magnitude]) -> None:
        """Operations that are missing in `magnitudes` get the value 0."""
        rows = [magnitudes.get(name, Magnitude(0, 0)) for name in names]
        self._start, self._span = np.array([(row.start, row.span) for row in rows], dtype=np.float64).T
        self._truncate = np.array([row.rounding == "truncate" for row in rows])
        self._nearest = np.array([row.rounding == "nearest" for row in rows])
        self._in_pixels = np.array([row.unit != "value" for row in rows])
        self._fraction_of_side = np.array([row.unit == "whole_pixels" for row in rows])
        self._vertical = np.array([name.endswith("_y") for name in names])

    def values(self, choice: Tensor, strengths: Tensor, height: int, width: int, scale: int = 1) -> Tensor:
        """Values, float64, of operations given by their positions `choice`, int64, and `strengths`, float64, all of one shape.

        Both are on the CPU. Vertical pixels refer to the `height` of the images, horizontal ones to their `width`. `scale` is
        the strength that means 1: strength * span is divided by it, in the order of the sources' arithmetic.
        """
        kinds = choice.numpy()
        side = np.where(self._vertical, height, width)
        moved = strengths.numpy() * self._span[kinds] / scale
        moved *= np.where(self._fraction_of_side, side, 1)[kinds]
        np.trunc(moved, out=moved, where=self._truncate[kinds])
        np.rint(moved, out=moved, where=self._nearest[kinds])
        moved /= np.where(self._in_pixels, side, 1)[kinds]
        return torch.from_numpy(self._start[kinds] + moved)


class RandAugment:
    """The strong policy of the paper and of the FixMatch family."""

    def __init__(self, variant: str = "paper", final_cutout: bool = True, geometry: bool = True) -> None:
        """Build the policy.

        Args:
            variant: a key of `VARIANTS`.
            final_cutout: whether a square is cut out at the end.
            geometry: whether operations that move pixels are drawn.
        """
        self.variant = VARIANTS[variant]
        self.final_cutout = final_cutout
        names = [name for name in self.variant.operations if geometry or not OPERATIONS[name].geometric]
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
        """Make the strong views of `images`: uint8 (N, C, H, W) to the same, contiguous."""
        operations = torch.where(draws.applied, draws.operations, _IDENTITY).cpu()
        views = apply_sequence(images, operations, draws.values)
        if self.variant.gray_fill:
            views = self._fill_gray(views, operations, draws.values)
        return cut_out_(views, draws.boxes, self.variant.cutout.color) if self.final_cutout else views

    @staticmethod
    def _fill_gray(views: Tensor, operations: Tensor, values: Tensor) -> Tensor:
        """Paint gray what a warp uncovered, unless a later operation made it opaque.

        Google's code works on RGBA images: warps uncover transparent black, some operations drop the alpha channel, and
        pixels that are still transparent at the end become gray. So the warps after the last operation that drops the alpha
        channel are applied to an opaque alpha channel. The gray is 127.5, which becomes 127 as a byte.
        """
        dropped_later = _DROPS_ALPHA[operations].flip(1).cumsum(1).flip(1) > 0
        seen = torch.where(_GEOMETRIC[operations] & ~dropped_later, operations, _IDENTITY)
        opaque = torch.full_like(views[:, :1], 255, memory_format=torch.contiguous_format)
        alpha = apply_sequence(opaque, seen, values)
        return (views & alpha).bitwise_or_(~alpha & GRAY[0])
