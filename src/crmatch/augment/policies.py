"""Strong policies: what a run's strong views are made with. A policy draws first and applies afterwards."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


class Policy(Protocol):
    """Strong augmentation of uint8 images."""

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Any:
        """All randomness for `count` images, as a tuple of tensors with that leading dimension."""

    def apply(self, images: Tensor, draws: Any) -> Tensor:
        """Augmented uint8 (N, C, H, W); a pure function."""


@runtime_checkable
class LearningPolicy(Policy, Protocol):
    """A policy that learns from labeled probes how far it may go."""

    def draw_probe(self, count: int, height: int, width: int, generator: torch.Generator) -> Any:
        """Draws of the probe policy, uniform over all strengths."""

    def learn(self, draws: Any, proximity: Tensor) -> None:
        """Update from probe draws and how close each prediction came to its label, float (N,) in 0..1."""

    def rates(self) -> dict[str, list[list[float]]]:
        """What was learned in words a record can hold: operation -> one list of rates per parameter."""

    def state(self) -> dict[str, Tensor]:
        """What was learned, for checkpoints."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from `state`."""


def build_policy(name: str, variant: str, cutout: bool, geometry: bool) -> Policy:
    """The strong policy `name`: `randaugment` in one of its variants, or `ctaugment`.

    Either with or without its final CutOut (`cutout`) and the operations that move pixels (`geometry`).
    """
    if name == "ctaugment":
        from crmatch.augment.ctaugment import CTAugment

        return CTAugment(final_cutout=cutout, geometry=geometry)
    from crmatch.augment.randaugment import RandAugment

    return RandAugment(variant, final_cutout=cutout, geometry=geometry)
