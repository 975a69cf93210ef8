"""From strengths to values: value = start + rounding(span * strength), for many images at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from crmatch.augment.variants import Magnitude


class MagnitudeTable:
    """The magnitudes of several operations as arrays, indexed by the operation's position."""

    def __init__(self, names: Sequence[str], magnitudes: Mapping[str, Magnitude]) -> None:
        """Operations that `magnitudes` does not name get the value 0."""
        rows = [magnitudes.get(name, Magnitude(0, 0)) for name in names]
        self._start = np.array([row.start for row in rows], dtype=np.float64)
        self._span = np.array([row.span for row in rows], dtype=np.float64)
        self._truncate = np.array([row.rounding == "truncate" for row in rows])
        self._nearest = np.array([row.rounding == "nearest" for row in rows])
        self._in_pixels = np.array([row.unit != "value" for row in rows])
        self._fraction_of_side = np.array([row.unit == "whole_pixels" for row in rows])
        self._vertical = np.array([name.endswith("_y") for name in names])

    def values(self, choice: Tensor, strengths: Tensor, height: int, width: int, scale: int = 1) -> Tensor:
        """Values of the chosen operations.

        Args:
            choice: int64, any shape, positions of operations; on the CPU like `strengths`.
            strengths: float64 of that shape.
            height: rows of the images, the unit of vertical pixels.
            width: columns of the images.
            scale: what `strengths` counts as 1; the product with the span is divided by it, as the sources do.

        Returns:
            float64 of that shape.
        """
        kinds = choice.numpy()
        side = np.where(self._vertical, height, width)
        moved = strengths.numpy() * self._span[kinds] / scale
        moved *= np.where(self._fraction_of_side, side, 1)[kinds]
        np.trunc(moved, out=moved, where=self._truncate[kinds])
        np.rint(moved, out=moved, where=self._nearest[kinds])
        moved /= np.where(self._in_pixels, side, 1)[kinds]
        return torch.from_numpy(self._start[kinds] + moved)
