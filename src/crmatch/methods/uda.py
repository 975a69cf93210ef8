"""UDA (Xie et al., NeurIPS 2020): predictions on strong views follow sharpened, confident predictions on weak views."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, STRONG, WEAK, LossTerms, Method, Models, PseudoLabels, Step, drop_zeros, spec_keys
from crmatch.methods.confidence import Ties, above

if TYPE_CHECKING:
    from torch import Tensor


class UDA(Method):
    """L = CE + lambda * (1/Bu) sum_j 1{max p_j > tau} KL(softmax(weak_j / T) || softmax(strong_j)), p_j = softmax(weak_j).

    With training signal annealing (TSA), CE is the mean over the labeled images whose true class has a probability of at most
    eta(t) = a(t) (1 - 1/K) + 1/K, where a(t) = u, exp(5 (u - 1)) or 1 - exp(-5 u) for u = step / steps.
    """

    title: ClassVar = "UDA"
    summary: ClassVar = "strong views follow the sharpened predictions on confident weak views"
    paper: ClassVar = "Xie et al., NeurIPS 2020, arXiv 1904.12848"
    works_on_features: ClassVar = True

    name: str = "uda"
    temperature: float = Field(0.4, gt=0)
    threshold: float = Field(0.8, ge=0, le=1)
    ties: Ties = "exclude"
    consistency_weight: float = Field(1.0, ge=0)
    entropy_weight: float = Field(0.0, ge=0)
    """Weight of the mean entropy of the predictions on weak views."""
    tsa: Literal["off", "linear", "exp", "log"] = "off"
    """Training signal annealing; the paper does not use it for images."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """`original`: google-research/uda; `usb`: its code ignores the temperature."""
        if recipe == "usb":
            return spec_keys("method", temperature=1.0)
        return spec_keys("plan", steps=500_000, ema_decay=0.9999, weight_decay=5e-4) if recipe == "original" else {}

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term in the total; terms with weight 0 are left out."""
        return drop_zeros(supervised=1.0, consistency=self.consistency_weight, entropy=self.entropy_weight)

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled, weak and strong views, if a term needs them."""
        return (LABELED, WEAK, STRONG) if self.consistency_weight else (LABELED, WEAK) if self.entropy_weight else (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms, from one forward pass over all views."""
        from crmatch.losses import cross_entropy, divergence, entropy, masked_mean
        from crmatch.networks.network import forward_together

        outputs = forward_together(models.student, batch.views)
        labeled = outputs["labeled"].logits  # (B, K)
        terms = {"supervised": self._annealed_mean(cross_entropy(labeled, batch.labels), labeled.shape[1], step)}
        pseudo_labels = None
        if self.consistency_weight:
            weak = outputs["weak"].logits.detach()  # (Bu, K)
            confidence, labels = weak.softmax(dim=1).max(dim=1)  # of the prediction before sharpening
            mask = above(confidence, self.threshold, self.ties)
            targets = (weak / self.temperature).softmax(dim=1)
            terms["consistency"] = masked_mean(divergence(targets, outputs["strong"].logits), mask)
            pseudo_labels = PseudoLabels(labels, mask)
        if self.entropy_weight:
            terms["entropy"] = entropy(outputs["weak"].logits).mean()
        return LossTerms(terms, self.weights, pseudo_labels=pseudo_labels)

    def _annealed_mean(self, errors: Tensor, classes: int, step: Step) -> Tensor:
        """Mean of the cross-entropies (B,) that training signal annealing keeps; 0 if it keeps none."""
        if self.tsa == "off":
            return errors.mean()
        progress = step.number / step.total
        share = {"linear": progress, "exp": math.exp(5 * (progress - 1)), "log": 1 - math.exp(-5 * progress)}[self.tsa]
        kept = (-errors.detach()).exp() <= share * (1 - 1 / classes) + 1 / classes
        return (errors * kept).sum() / kept.sum().clamp(min=1)
