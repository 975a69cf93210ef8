"""UDA (Xie et al., NeurIPS 2020): strong views follow the sharpened predictions of confident weak views."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, STRONG, WEAK, LossTerms, Method, Models, PseudoLabels, Step
from crmatch.methods.confidence import Ties, above

if TYPE_CHECKING:
    from torch import Tensor


class UDA(Method):
    """L = CE + lambda * (1/Bu) sum_j 1{max p_j >= tau} KL(softmax(weak_j / T) || softmax(strong_j)), p unsharpened.

    With training signal annealing the supervised term counts only labeled images whose true class has a probability of at most
    eta(t) = a(t) (1 - 1/K) + 1/K, averaged over those; a(t) = u, exp(5 (u - 1)) or 1 - exp(-5 u), u = step / steps.
    """

    title: ClassVar = "UDA"
    summary: ClassVar = "strong views follow the sharpened predictions on confident weak views"
    paper: ClassVar = "Xie et al., NeurIPS 2020, arXiv 1904.12848"

    name: str = "uda"
    temperature: float = Field(0.4, gt=0)
    threshold: float = Field(0.8, ge=0, le=1)
    ties: Ties = "exclude"
    consistency_weight: float = Field(1.0, ge=0)
    entropy_weight: float = Field(0.0, ge=0)
    """Of the mean entropy of predictions on weak views."""
    tsa: Literal["off", "linear", "exp", "log"] = "off"
    """Training signal annealing of the supervised term; off for images."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """`original`: 500,000 steps, and a slower average; `usb`: its code passes the temperature on and ignores it."""
        if recipe == "usb":
            return {"method.temperature": 1.0}
        original = {"plan.steps": 500_000, "plan.ema_decay": 0.9999, "plan.weight_decay": 5e-4}
        return original if recipe == "original" else {}

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled, weak and strong, as far as a term needs them."""
        weak = self.consistency_weight or self.entropy_weight
        return (LABELED, *(WEAK,) * bool(weak), *(STRONG,) * bool(self.consistency_weight))

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms from one pass over all views."""
        from crmatch.losses import cross_entropy, divergence, entropy, masked_mean
        from crmatch.networks.network import forward_together

        outputs = forward_together(models.student, batch.views)
        errors = cross_entropy(outputs["labeled"].logits, batch.labels)
        terms, weights = (
            {"supervised": self._annealed_mean(errors, outputs["labeled"].logits.shape[1], step)},
            {"supervised": 1.0},
        )
        pseudo_labels = None
        if self.consistency_weight:
            weak = outputs["weak"].logits.detach()
            confidence, labels = weak.softmax(dim=1).max(dim=1)
            confident = above(confidence, self.threshold, self.ties)
            targets = (weak / self.temperature).softmax(dim=1)
            terms["consistency"] = masked_mean(divergence(targets, outputs["strong"].logits), confident)
            weights["consistency"] = self.consistency_weight
            pseudo_labels = PseudoLabels(labels, confident)
        if self.entropy_weight:
            terms["entropy"] = entropy(outputs["weak"].logits).mean()
            weights["entropy"] = self.entropy_weight
        return LossTerms(terms, weights, pseudo_labels=pseudo_labels)

    def _annealed_mean(self, errors: Tensor, classes: int, step: Step) -> Tensor:
        """Mean of the cross-entropies that training signal annealing keeps; 0 where it keeps none."""
        if self.tsa == "off":
            return errors.mean()
        progress = step.number / step.total
        share = {"linear": progress, "exp": math.exp(5 * (progress - 1)), "log": 1 - math.exp(-5 * progress)}[self.tsa]
        kept = (-errors.detach()).exp() <= share * (1 - 1 / classes) + 1 / classes
        return (errors * kept).sum() / kept.sum().clamp(min=1)
