"""FixMatch (Sohn et al., NeurIPS 2020): confident predictions on weak views label the strong views."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from crmatch.augment.views import Batch, View
from crmatch.methods.base import LABELED, STRONG, WEAK, LossTerms, Method, Models, PseudoLabels, Step
from crmatch.methods.confidence import Alignment, ConfidenceRule, Mask, Ties

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape, Outputs


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
    mask: Mask = "fixed"
    """Which pseudo-labels count: a fixed threshold, FlexMatch's, FreeMatch's, SoftMatch's or AdaMatch's rule."""
    alignment: Alignment = "none"
    """Whether predictions are aligned with uniform classes, or with the predictions on labeled images."""
    average_decay: float | None = Field(None, ge=0, lt=1)
    """How slowly the averages of mask and alignment follow; None: as the moving average of the weights does."""
    free_quantile: float | None = Field(None, ge=0, le=1)
    """FreeMatch: follow this quantile of the confidences instead of their mean."""
    free_clip: float | None = Field(None, gt=0, le=1)
    """FreeMatch: the highest the global threshold may rise."""
    soft_sigmas: float = Field(2.0, gt=0)
    """SoftMatch: how many times narrower than the confidences' deviation the Gaussian is."""
    supervised_weight: float = Field(1.0, ge=0)
    pseudo_label_weight: float = Field(1.0, ge=0)
    unlabeled_weight: float = Field(1.0, ge=0)
    """lambda_u: scales all terms of the unlabeled loss L_U together."""
    fairness_weight: float = Field(0.001, ge=0)
    """FreeMatch's fairness term; only with mask free."""

    @model_validator(mode="after")
    def _has_a_term(self) -> Self:
        if not self.weights:
            raise ValueError("every weight is 0, so there is nothing to train; give at least one term a weight above 0")
        asks_labeled = self.mask == "ada" or self.alignment == "labeled"
        if asks_labeled and self.makes_pseudo_labels and "supervised" not in self.weights:
            raise ValueError("mask ada and alignment labeled look at labeled images; give supervised_weight a value above 0")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term in the total, those of exactly 0 left out."""
        weights = {
            "supervised": self.supervised_weight,
            "pseudo_label": self.unlabeled_weight * self.pseudo_label_weight,
            "fairness": self.fairness_weight * (self.mask == "free") * bool(self.unlabeled_weight * self.pseudo_label_weight),
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

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """What the confidence rule remembers."""
        from crmatch.networks.network import RunningState

        state = self.rule().state(shape.classes, shape.unlabeled) if self.makes_pseudo_labels else {}
        return {"mask": RunningState(**state)} if state else {}

    def rule(self, ema_decay: float = 0.0) -> ConfidenceRule:
        """Which pseudo-labels count; `ema_decay` is that of the weights."""
        return ConfidenceRule(
            self.mask,
            self.alignment,
            self.threshold,
            self.ties,
            ema_decay if self.average_decay is None else self.average_decay,
            self.free_quantile,
            self.free_clip,
            self.soft_sigmas,
        )

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """L_S and L_PseudoLabel from one pass over all views."""
        from crmatch.networks.network import forward_together

        outputs = forward_together(models.student, batch.views)
        terms, pseudo_labels = self.self_training_terms(batch, outputs, models.student, step)
        return LossTerms(terms, self.weights, pseudo_labels=pseudo_labels)

    def self_training_terms(
        self, batch: Batch, outputs: dict[str, Outputs], student: Network, step: Step
    ) -> tuple[dict[str, Tensor], PseudoLabels | None]:
        """The terms that FixMatch and CR-Match share, and the pseudo-labels behind them.

        supervised    L_S = (1/B) sum_i CE(y_i, g(f(alpha(x_i)))), Eq. (6)
        pseudo_label  (1/Bu) sum_j 1{c_j > tau} CE(yhat_j, g(f(A(u_j)))), Eqs. (3) and (4); other masks than fixed put their
                      own weight in the place of 1{c_j > tau}
        fairness      FreeMatch's, with mask free
        """
        from crmatch.losses import cross_entropy, fairness, masked_mean

        weights, terms = self.weights, {}
        if "supervised" in weights:
            terms["supervised"] = cross_entropy(outputs["labeled"].logits, batch.labels).mean()
        if not self.makes_pseudo_labels:
            return terms, None
        weak = outputs["weak"].logits.detach().softmax(dim=1)
        labeled = outputs["labeled"].logits.detach().softmax(dim=1) if "labeled" in outputs else None
        state = student.state("mask")
        probabilities, labels, used = self.rule(step.ema_decay).select(weak, labeled, batch.unlabeled, state)
        if "pseudo_label" in weights:
            targets = labels if self.pseudo_labels == "hard" else probabilities
            terms["pseudo_label"] = masked_mean(cross_entropy(outputs["strong"].logits, targets), used)
        if "fairness" in weights:
            terms["fairness"] = fairness(outputs["strong"].logits, used, state["prediction"], state["histogram"])
        return terms, PseudoLabels(labels, used)
