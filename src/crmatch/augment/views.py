"""The views a method asks for, the policy that makes strong views, and the batch. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Source = Literal["labeled", "unlabeled", "extra"]


class View(NamedTuple):
    """One augmented version of one group of images."""

    name: str  # the key in `Batch.views`, and the name of the random stream
    source: Source  # labeled images, unlabeled images, or a second, independent draw of unlabeled images (`extra`)
    # weak: crop and mirror; strong: weak, then the run's strong policy; strong_only: the policy on the untouched image
    augmentation: Literal["none", "weak", "strong", "strong_only"]


class FirstStage(NamedTuple):
    """The beginning of a run, on batches of labeled images alone; its learning rate is the first phase of the schedule."""

    steps: int
    batch_size: int

    @classmethod
    def of_passes(cls, passes: int, batch_size: int, labeled: int) -> FirstStage:
        """So many passes over `labeled` images; the incomplete batch at the end of a pass is left out."""
        size = min(batch_size, labeled)
        return cls(passes * (labeled // size), size)


NO_FIRST_STAGE = FirstStage(0, 0)


class Policy(Protocol):
    """Strong augmentation of uint8 images: all randomness is drawn first and applied afterwards."""

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Any:
        """Draw all randomness for `count` images, as a tuple of tensors with that leading dimension."""

    def apply(self, images: Tensor, draws: Any) -> Tensor:
        """Augment uint8 (N, C, H, W); a pure function."""


@dataclass(frozen=True)
class Batch:
    """All data of one step that a loss may use."""

    labels: Tensor  # int64 (B,), classes of the labeled images
    views: Mapping[str, Tensor]  # name -> float (N, C, H, W), normalized
    unlabeled: Tensor  # int64 (Bu,), positions of the unlabeled images in the unlabeled pool, for methods with memory
