"""From strengths to values: value = start + rounding(span * strength), for many images at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from crmatch.augment.variants import Magnitude


class MagnitudeTable:
    """The magnitudes of several operations as tensors, indexed by the operation's position."""

    def __init__(self, names: Sequence[str], magnitudes: Mapping[str, Magnitude]) -> None:
        """Operations that `magnitudes` does not name get the value 0."""
        rows = [magnitudes.get(name, Magnitude(0, 0)) for name in names]
        self._start = torch.tensor([float(row.start) for row in rows], dtype=torch.float64)
        self._span = torch.tensor([float(row.span) for row in rows], dtype=torch.float64)
        self._truncate = torch.tensor([row.rounding == "truncate" for row in rows])
        self._nearest = torch.tensor([row.rounding == "nearest" for row in rows])
        self._pixels = torch.tensor([row.unit != "value" for row in rows])
        self._fraction = torch.tensor([row.unit == "whole_pixels" for row in rows])
        self._vertical = torch.tensor([name.endswith("_y") for name in names])

    def values(self, choice: Tensor, strengths: Tensor, height: int, width: int, scale: int = 1) -> Tensor:
        """Values of the chosen operations.

        Args:
            choice: int64, any shape, positions of operations.
            strengths: float64 of that shape.
            height: rows of the images, the unit of vertical pixels.
            width: columns of the images.
            scale: what `strengths` counts as 1; the product with the span is divided by it, as the sources do.

        Returns:
            float64 of that shape.
        """
        moved = strengths * self._span[choice]
        if scale != 1:
            moved = moved / scale
        sides = torch.where(self._vertical, height, width)[choice]
        moved = torch.where(self._fraction[choice], moved * sides, moved)
        moved = torch.where(self._truncate[choice], moved.trunc(), moved)
        moved = torch.where(self._nearest[choice], moved.round(), moved)
        moved = torch.where(self._pixels[choice], moved / sides, moved)
        return self._start[choice] + moved
