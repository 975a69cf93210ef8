"""Confidence rules: which pseudo-labels count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Ties = Literal["exclude", "include"]


def fixed_mask(confidence: Tensor, threshold: float, ties: Ties) -> Tensor:
    """1{c > tau} (`exclude`, as the paper prints) or 1{c >= tau} (`include`, as FixMatch's and USB's code): bool (N,)."""
    return confidence > threshold if ties == "exclude" else confidence >= threshold
