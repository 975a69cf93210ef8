"""Supervised only: what the labels alone can do, the baseline of every other method."""

from __future__ import annotations

from typing import ClassVar

from crmatch.augment.views import Batch, View
from crmatch.methods.base import LossTerms, Method, Models, Step


class Supervised(Method):
    """Cross-entropy on weakly augmented labeled images, Eq. (6)."""

    title: ClassVar = "Supervised only"
    summary: ClassVar = "cross-entropy on the labeled images, weakly augmented; uses no unlabeled image"
    paper: ClassVar = "baseline"

    name: str = "supervised"

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images only."""
        return (View("labeled", "labeled", "weak"),)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """L_S."""
        from crmatch.losses import cross_entropy

        outputs = models.student(batch.views["labeled"])
        return LossTerms({"supervised": cross_entropy(outputs.logits, batch.labels).mean()}, {"supervised": 1.0})
