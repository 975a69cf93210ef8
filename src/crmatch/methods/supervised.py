"""Supervised only: the baseline, trained on the labeled images alone."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, LossTerms, Method, Models, Step, original_optimizer, spec_keys


class Supervised(Method):
    """L = L_S: cross-entropy on weakly augmented labeled images, Eq. (6)."""

    title: ClassVar = "Supervised only"
    summary: ClassVar = "cross-entropy on the labeled images, weakly augmented; uses no unlabeled image"
    paper: ClassVar = "baseline"
    works_on_features: ClassVar = True

    name: str = "supervised"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """s: the targets are (1 - s) * onehot + s / K."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """`original` is the fully supervised baseline of google-research/mixmatch."""
        return original_optimizer() | spec_keys("method", label_smoothing=0.001) if recipe == "original" else {}

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images only."""
        return (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """L_S."""
        from crmatch.losses import cross_entropy

        logits = models.student(batch.views["labeled"]).logits
        return LossTerms({"supervised": cross_entropy(logits, batch.labels, self.label_smoothing).mean()}, {"supervised": 1.0})
