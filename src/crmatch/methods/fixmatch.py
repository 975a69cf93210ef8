"""FixMatch (Sohn et al., NeurIPS 2020): confident predictions on weak views are labels of the strong views."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from crmatch.augment.views import Batch, View
from crmatch.methods.base import LABELED, STRONG, WEAK, LossTerms, Method, Models, PseudoLabels, Step, nonzero
from crmatch.methods.confidence import Alignment, Mask, Ties, initial_state, select

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape, Outputs


class FixMatch(Method):
    """L = L_S + lambda_u * L_PseudoLabel. Equation numbers are those of CR-Match's paper.

    FlexMatch, FreeMatch, SoftMatch and AdaMatch are FixMatch with another `mask` and `alignment` (confidence.py).
    """

    title: ClassVar = "FixMatch"
    summary: ClassVar = "confident predictions on weakly augmented images label their strongly augmented versions"
    paper: ClassVar = "Sohn et al., NeurIPS 2020, arXiv 2001.07685"

    name: str = "fixmatch"
    threshold: float = Field(0.95, ge=0, le=1)
    """tau: pseudo-labels with a higher confidence are used."""
    ties: Ties = "exclude"
    """Whether pseudo-labels with a confidence equal to the threshold are used."""
    pseudo_labels: Literal["hard", "soft"] = "hard"
    """The most probable class, or the predicted distribution (temperature 1)."""
    mask: Mask = "fixed"
    """Which pseudo-labels are used: a fixed threshold, or the rule of FlexMatch, FreeMatch, SoftMatch or AdaMatch."""
    alignment: Alignment = "none"
    """Align predictions with a uniform class distribution, or with the predictions on labeled images."""
    average_decay: float | None = Field(None, ge=0, lt=1)
    """Decay of the running averages of mask and alignment; None: the decay of the weights' moving average."""
    free_quantile: float | None = Field(None, ge=0, le=1)
    """FreeMatch: average this quantile of the confidences instead of their mean."""
    free_clip: float | None = Field(None, gt=0, le=1)
    """FreeMatch: upper limit of the global threshold."""
    soft_sigmas: float = Field(2.0, gt=0)
    """SoftMatch: the Gaussian is this many times narrower than the standard deviation of the confidences."""
    supervised_weight: float = Field(1.0, ge=0)
    pseudo_label_weight: float = Field(1.0, ge=0)
    unlabeled_weight: float = Field(1.0, ge=0)
    """lambda_u: a common factor of all terms of L_U."""
    fairness_weight: float = Field(0.001, ge=0)
    """Weight of FreeMatch's fairness term; only with mask free."""

    @model_validator(mode="after")
    def _has_a_term(self) -> Self:
        if not self.weights:
            raise ValueError("every weight is 0, so there is nothing to train; give at least one term a weight above 0")
        needs_labeled = self.mask == "ada" or self.alignment == "labeled"
        if needs_labeled and self.needs_pseudo_labels and "supervised" not in self.weights:
            raise ValueError("mask ada and alignment labeled use the labeled images; give supervised_weight a value above 0")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term in the total; terms with weight 0 are left out."""
        pseudo_label = self.unlabeled_weight * self.pseudo_label_weight
        fairness = self.fairness_weight if self.mask == "free" and pseudo_label else 0.0
        return nonzero(supervised=self.supervised_weight, pseudo_label=pseudo_label, fairness=fairness)

    @property
    def needs_pseudo_labels(self) -> bool:
        """Whether a term needs pseudo-labels or their confidence mask."""
        return "pseudo_label" in self.weights

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled, weak and strong views, if a term needs them."""
        return (LABELED,) * ("supervised" in self.weights) + (WEAK, STRONG) * ("pseudo_label" in self.weights)

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """The running state of the confidence rule, if it has any."""
        from crmatch.networks.network import RunningState

        state = initial_state(self, shape.classes, shape.unlabeled) if self.needs_pseudo_labels else {}
        return {"mask": RunningState(**state)} if state else {}

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """L_S + lambda_u * L_PseudoLabel, from one forward pass over labeled, weak and strong views."""
        from crmatch.losses import cross_entropy, fairness, masked_mean
        from crmatch.networks.network import forward_together

        student, weights = models.student, self.weights
        terms: dict[str, Tensor] = {}
        pseudo_labels = None
        outputs = forward_together(student, batch.views)

        # Supervised term L_S, Eq. (6): logits (B, K), labels (B,)
        if "supervised" in weights:
            terms["supervised"] = cross_entropy(outputs["labeled"].logits, batch.labels).mean()

        # Pseudo-label term L_PseudoLabel, Eqs. (3) and (4): targets (Bu,) from the weak views, logits (Bu, K) of the strong
        # views. The mean is over all Bu images, including those that the confidence mask 1{c > tau} (Bu,) leaves out.
        if "pseudo_label" in weights:
            targets, pseudo_labels = self.make_pseudo_labels(batch, outputs, student, step)
            logits, mask = outputs["strong"].logits, pseudo_labels.used
            terms["pseudo_label"] = masked_mean(cross_entropy(logits, targets), mask)
            if "fairness" in weights:  # FreeMatch only
                state = student.state("mask")
                terms["fairness"] = fairness(logits, mask, state["prediction"], state["histogram"])
        return LossTerms(terms, weights, pseudo_labels=pseudo_labels)

    def make_pseudo_labels(
        self, batch: Batch, outputs: dict[str, Outputs], student: Network, step: Step
    ) -> tuple[Tensor, PseudoLabels]:
        """Targets of the strong views, int64 (Bu,) or soft (Bu, K), and the confidence mask (Bu,), without gradient.

        By default: p = softmax(g(f(alpha(u)))), target argmax p, mask 1{max p > tau}.
        """
        weak = outputs["weak"].logits.detach().softmax(dim=1)  # (Bu, K)
        labeled = outputs["labeled"].logits.detach().softmax(dim=1) if "labeled" in outputs else None  # (B, K)
        decay = step.ema_decay if self.average_decay is None else self.average_decay
        probabilities, labels, mask = select(self, weak, labeled, batch.unlabeled, student.state("mask"), decay)
        return labels if self.pseudo_labels == "hard" else probabilities, PseudoLabels(labels, mask)
