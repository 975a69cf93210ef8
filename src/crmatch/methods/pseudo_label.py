"""Pseudo-Label (Lee, ICML workshop 2013): a confident prediction is the label of the same view."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, WEAK, LossTerms, Method, Models, PseudoLabels, Step, older_recipe, spec_keys
from crmatch.methods.confidence import Ties, above


class PseudoLabel(Method):
    """L = CE + w(t) * lambda * (1/Bu) sum_j 1{max p_j > tau} CE(argmax p_j, logits_j), all on one weak view.

    google-research/fixmatch broadcasts the mask over the batch, which gives mean(mask) * mean(CE). Here the mask has one value
    per image, as the paper means it.
    """

    title: ClassVar = "Pseudo-Label"
    summary: ClassVar = "confident predictions become labels of the same weakly augmented image"
    paper: ClassVar = "Lee, ICML workshop 2013"
    works_on_features: ClassVar = True
    running_statistics: ClassVar = "labeled"

    name: str = "pseudo_label"
    threshold: float = Field(0.95, ge=0, le=1)
    ties: Ties = "exclude"
    pseudo_label_weight: float = Field(1.0, ge=0)
    ramp_share: float = Field(0.4, gt=0, le=1)
    """w(t) rises linearly from 0 to 1 over this share of the run; more slowly in a short one (`Method.ramp`)."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """google-research/fixmatch: twice the weight on SVHN."""
        svhn = spec_keys("method", pseudo_label_weight=2) if setting.stem == "svhn" and recipe != "usb" else {}
        return svhn | older_recipe(recipe, {})

    @property
    def views(self) -> tuple[View, ...]:
        """Weak views of labeled and unlabeled images."""
        return (LABELED, WEAK) if self.pseudo_label_weight else (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Supervised and pseudo-label terms, from one forward pass each."""
        from crmatch.losses import cross_entropy, masked_mean
        from crmatch.networks.batch_norm import forward_without_bn_update

        terms = {"supervised": cross_entropy(models.student(batch.views["labeled"]).logits, batch.labels).mean()}
        weights = {"supervised": 1.0}
        if not self.pseudo_label_weight:
            return LossTerms(terms, weights)
        logits = forward_without_bn_update(models.student, batch.views["weak"]).logits  # (Bu, K)
        confidence, labels = logits.detach().softmax(dim=1).max(dim=1)
        mask = above(confidence, self.threshold, self.ties)
        terms["pseudo_label"] = masked_mean(cross_entropy(logits, labels), mask)
        weights["pseudo_label"] = self.pseudo_label_weight * self.ramp(self.ramp_share * self.reference_steps, step)
        return LossTerms(terms, weights, pseudo_labels=PseudoLabels(labels, mask))
