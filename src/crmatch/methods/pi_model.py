"""Pi-model (Laine and Aila, ICLR 2017): two views of an image get the same prediction."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import (
    LABELED,
    SECOND_WEAK,
    WEAK,
    LossTerms,
    Method,
    Models,
    PseudoLabels,
    Step,
    older_recipe,
    spec_keys,
)


class PiModel(Method):
    """L = CE + w(t) * lambda * mean (softmax(first view) - softmax(second view))^2, without gradient in the first view."""

    title: ClassVar = "Pi-model"
    summary: ClassVar = "two weak views of an image get the same prediction"
    paper: ClassVar = "Laine and Aila, ICLR 2017, arXiv 1610.02242"
    running_statistics: ClassVar = "labeled"

    name: str = "pi_model"
    consistency_weight: float = Field(10.0, ge=0)
    ramp_share: float = Field(0.4, gt=0, le=1)
    """w(t) rises linearly from 0 to 1 over this share of the run; more slowly in a short one (`Method.ramp`)."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """`original`: the weights of google-research/mixmatch."""
        weight = {"cifar10": 20, "cifar100": 20, "svhn": 5}.get(setting.stem or "", 10)
        return older_recipe(recipe, spec_keys("method", consistency_weight=weight))

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images, and two weak views of the unlabeled images."""
        return (LABELED, WEAK, SECOND_WEAK) if self.consistency_weight else (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Supervised and consistency terms, from three forward passes of the student."""
        import torch

        from crmatch.losses import cross_entropy, squared_difference
        from crmatch.networks.batch_norm import forward_without_bn_update

        terms = {"supervised": cross_entropy(models.student(batch.views["labeled"]).logits, batch.labels).mean()}
        weights, pseudo_labels = {"supervised": 1.0}, None
        if self.consistency_weight:
            with torch.no_grad():
                targets = forward_without_bn_update(models.student, batch.views["weak"]).logits.softmax(dim=1)  # (Bu, K)
            logits = forward_without_bn_update(models.student, batch.views["second_weak"]).logits
            terms["consistency"] = squared_difference(logits, targets)
            weights["consistency"] = self.consistency_weight * self.ramp(self.ramp_share * self.reference_steps, step)
            pseudo_labels = PseudoLabels.all_used(targets)
        return LossTerms(terms, weights, pseudo_labels=pseudo_labels)
