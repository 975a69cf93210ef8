"""FixMatch (Sohn et al., NeurIPS 2020): confident predictions on weak views label the strong views."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from crmatch.augment.views import Batch, View
from crmatch.methods.base import LossTerms, Method, Models, PseudoLabels, Step
from crmatch.methods.masks import Ties, fixed_mask

if TYPE_CHECKING:
    from torch import Tensor

    from crmatch.networks.outputs import Outputs

LABELED = View("labeled", "labeled", "weak")
WEAK = View("weak", "unlabeled", "weak")
STRONG = View("strong", "unlabeled", "strong")


class FixMatch(Method):
    """L = L_S + lambda_u * L_PseudoLabel, Eqs. (3), (4) and (6) without the feature distance."""

    title: ClassVar = "FixMatch"
    summary: ClassVar = "confident predictions on weakly augmented images label their strongly augmented versions"
    paper: ClassVar = "Sohn et al., NeurIPS 2020, arXiv 2001.07685"

    name: str = "fixmatch"
    threshold: float = Field(0.95, ge=0, le=1)
    """tau: confidence above which a pseudo-label counts."""
    ties: Ties = "exclude"
    """Whether a confidence equal to the threshold counts."""
    pseudo_labels: Literal["hard", "soft"] = "hard"
    """The most probable class, or the whole predicted distribution (temperature 1)."""
    supervised_weight: float = Field(1.0, ge=0)
    pseudo_label_weight: float = Field(1.0, ge=0)
    unlabeled_weight: float = Field(1.0, ge=0)
    """lambda_u: scales all terms of the unlabeled loss L_U together."""

    @model_validator(mode="after")
    def _has_a_term(self) -> Self:
        if not self.weights:
            raise ValueError("every weight is 0, so there is nothing to train; give at least one term a weight above 0")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term in the total, those of exactly 0 left out."""
        weights = {
            "supervised": self.supervised_weight,
            "pseudo_label": self.unlabeled_weight * self.pseudo_label_weight,
        }
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled, weak and strong, as far as a term needs them."""
        return (LABELED,) * ("supervised" in self.weights) + (WEAK, STRONG) * ("pseudo_label" in self.weights)

    @property
    def makes_pseudo_labels(self) -> bool:
        """Whether any term needs to know which unlabeled images are confident."""
        return "pseudo_label" in self.weights

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """L_S and L_PseudoLabel from one pass over all views."""
        from crmatch.networks.outputs import forward_together

        outputs = forward_together(models.student, batch.views)
        terms, pseudo_labels = self.self_training_terms(batch, outputs)
        return LossTerms(terms, self.weights, pseudo_labels=pseudo_labels)

    def self_training_terms(self, batch: Batch, outputs: dict[str, Outputs]) -> tuple[dict[str, Tensor], PseudoLabels | None]:
        """The terms that FixMatch and CR-Match share, and the pseudo-labels behind them.

        supervised    L_S = (1/B) sum_i CE(y_i, g(f(alpha(x_i)))), Eq. (6)
        pseudo_label  (1/Bu) sum_j 1{c_j > tau} CE(yhat_j, g(f(A(u_j)))), Eqs. (3) and (4)
        """
        from crmatch.losses import cross_entropy, masked_mean

        weights, terms = self.weights, {}
        if "supervised" in weights:
            terms["supervised"] = cross_entropy(outputs["labeled"].logits, batch.labels).mean()
        if not self.makes_pseudo_labels:
            return terms, None
        probabilities = outputs["weak"].logits.detach().softmax(dim=1)
        confidence, predicted = probabilities.max(dim=1)
        confident = fixed_mask(confidence, self.threshold, self.ties)
        if "pseudo_label" in weights:
            targets = predicted if self.pseudo_labels == "hard" else probabilities
            terms["pseudo_label"] = masked_mean(cross_entropy(outputs["strong"].logits, targets), confident)
        return terms, PseudoLabels(predicted, confident)
