"""FixMatch (Sohn et al., NeurIPS 2020): confident predictions on weak views label the strong views."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from crmatch.augment.views import Batch, View
from crmatch.methods.base import LABELED, STRONG, WEAK, LossTerms, Method, Models, PseudoLabels, Step, drop_zeros
from crmatch.methods.confidence import Alignment, Mask, Ties, initial_state, select

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape, Outputs


class FixMatch(Method):
    """L = L_S + lambda_u * L_PseudoLabel (+ fairness with mask free). Equation numbers are those of CR-Match's paper.

    FlexMatch, FreeMatch, SoftMatch and AdaMatch are FixMatch with another `mask` and `alignment` (confidence.py).
    """

    title: ClassVar = "FixMatch"
    summary: ClassVar = "confident predictions on weakly augmented images label their strongly augmented versions"
    paper: ClassVar = "Sohn et al., NeurIPS 2020, arXiv 2001.07685"
    works_on_features: ClassVar = True

    name: str = "fixmatch"
    threshold: float = Field(0.95, ge=0, le=1)
    """tau: pseudo-labels with a confidence above it are used (masks fixed, flex and ada)."""
    ties: Ties = "exclude"
    """Whether pseudo-labels with a confidence equal to the threshold are used."""
    pseudo_labels: Literal["hard", "soft"] = "hard"
    """The most probable class, or the predicted distribution (not sharpened)."""
    mask: Mask = "fixed"
    """How confidence decides the weight of each pseudo-label: a fixed threshold, or the rule of another method."""
    alignment: Alignment = "none"
    """Rescale predictions towards uniform classes, or towards the class distribution predicted for labeled images."""
    average_decay: float | None = Field(None, ge=0, lt=1)
    """Decay of the running averages of mask and alignment; None: plan.ema_decay, the decay of the network's EMA."""
    free_quantile: float | None = Field(None, ge=0, le=1)
    """FreeMatch: average this quantile of the confidences instead of their mean."""
    free_clip: float | None = Field(None, gt=0, le=1)
    """FreeMatch: upper limit of the global threshold."""
    soft_sigmas: float = Field(2.0, gt=0)
    """SoftMatch: width of the Gaussian = standard deviation of the confidences / this value."""
    supervised_weight: float = Field(1.0, ge=0)
    pseudo_label_weight: float = Field(1.0, ge=0)
    unlabeled_weight: float = Field(1.0, ge=0)
    """lambda_u: a common factor of all terms of L_U."""
    fairness_weight: float = Field(0.001, ge=0)
    """Weight of FreeMatch's fairness term; only with mask free."""

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
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
        fairness = self.fairness_weight if self.mask == "free" and pseudo_label > 0 else 0.0
        return drop_zeros(supervised=self.supervised_weight, pseudo_label=pseudo_label, fairness=fairness)

    @property
    def needs_pseudo_labels(self) -> bool:
        """Whether a term needs pseudo-labels or their confidence mask."""
        return "pseudo_label" in self.weights

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled, weak and strong views, if a term needs them."""
        labeled = (LABELED,) if "supervised" in self.weights else ()
        return (*labeled, WEAK, STRONG) if "pseudo_label" in self.weights else labeled

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """The running state of the confidence rule, a head without weights, so that checkpoints hold it."""
        from crmatch.networks.network import RunningState

        state = initial_state(self, shape.classes, shape.unlabeled) if self.needs_pseudo_labels else {}
        return {"mask": RunningState(**state)} if state else {}

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """L_S + lambda_u * L_PseudoLabel, from one forward pass over labeled, weak and strong views."""
        from crmatch.losses import cross_entropy, fairness, masked_mean
        from crmatch.networks.network import forward_together

        student, weights = models.student, self.weights  # models.teacher, the EMA, is only evaluated
        terms: dict[str, Tensor] = {}
        pseudo_labels = None
        outputs = forward_together(student, batch.views)

        # Supervised term L_S, Eq. (6): logits (B, K), labels (B,)
        if "supervised" in weights:
            terms["supervised"] = cross_entropy(outputs["labeled"].logits, batch.labels).mean()

        # Pseudo-label term L_PseudoLabel, Eqs. (3) and (4): targets (Bu,) from the weak views, logits (Bu, K) of the strong
        # views. The mean is over all Bu images, including those that the confidence mask 1{c > tau} (Bu,) leaves out.
        if "pseudo_label" in weights:
            targets, mask, pseudo_labels = self.make_pseudo_labels(batch, outputs, student, step)
            logits = outputs["strong"].logits
            terms["pseudo_label"] = masked_mean(cross_entropy(logits, targets), mask)
            if "fairness" in weights:  # only with mask free
                state = student.state("mask")  # running averages, see confidence.py
                terms["fairness"] = fairness(logits, mask, state["prediction"], state["histogram"])
        return LossTerms(terms, weights, pseudo_labels=pseudo_labels)

    def make_pseudo_labels(
        self, batch: Batch, outputs: dict[str, Outputs], student: Network, step: Step
    ) -> tuple[Tensor, Tensor, PseudoLabels]:
        """Targets of the strong views, int64 (Bu,) or soft (Bu, K), confidence mask (Bu,), and both for the curves.

        No gradient flows through them. By default: p = softmax(g(f(alpha(u)))), target argmax p, mask 1{max p > tau}.
        """
        weak = outputs["weak"].logits.detach().softmax(dim=1)  # (Bu, K)
        labeled = outputs["labeled"].logits.detach().softmax(dim=1) if "labeled" in outputs else None  # (B, K)
        decay = step.ema_decay if self.average_decay is None else self.average_decay
        probabilities, labels, mask = select(
            self, weak, labeled, images=batch.unlabeled, state=student.state("mask"), decay=decay
        )
        targets = labels if self.pseudo_labels == "hard" else probabilities
        return targets, mask, PseudoLabels(labels, mask)
