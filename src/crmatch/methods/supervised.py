"""Supervised only: what the labels alone can do, the baseline of every other method."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, LossTerms, Method, Models, Step, original_optimizer


class Supervised(Method):
    """Cross-entropy on weakly augmented labeled images, Eq. (6)."""

    title: ClassVar = "Supervised only"
    summary: ClassVar = "cross-entropy on the labeled images, weakly augmented; uses no unlabeled image"
    paper: ClassVar = "baseline"

    name: str = "supervised"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """s: targets are (1 - s) * onehot + s / K."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """`original` is MixMatch's fully supervised baseline."""
        return original_optimizer() | {"method.label_smoothing": 0.001} if recipe == "original" else {}

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images only."""
        return (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """L_S."""
        from crmatch.losses import smoothed_cross_entropy

        outputs = models.student(batch.views["labeled"])
        supervised = smoothed_cross_entropy(outputs.logits, batch.labels, self.label_smoothing).mean()
        return LossTerms({"supervised": supervised}, {"supervised": 1.0})
