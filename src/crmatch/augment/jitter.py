"""Color jitter with torchvision's definition: brightness, contrast, saturation and hue in a random order per image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.augment.operations import OPERATION_NAMES, apply_sequence, check_draws, check_images

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
