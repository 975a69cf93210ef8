"""Virtual adversarial training (Miyato et al., TPAMI 2018): predictions resist the worst small perturbation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import (
    LABELED,
    WEAK,
    LossTerms,
    Method,
    Models,
    PseudoLabels,
    Step,
    equal_batches,
    original_optimizer,
)

if TYPE_CHECKING:
    from torch import Tensor


class VAT(Method):
    """L = CE + w(t) * lambda * KL(p(u) || p(u + r)) + lambda_e * H(p(u)).

    r = eps * g / |g| for each image, where g is the gradient of KL(p(u) || p(u + xi d)) with respect to xi d, and d is a random
    direction of length 1: one power iteration.
    """

    title: ClassVar = "VAT"
    summary: ClassVar = "predictions stay the same under the perturbation that would change them most"
    paper: ClassVar = "Miyato et al., TPAMI 2018, arXiv 1704.03976"
    running_statistics: ClassVar = "labeled"

    name: str = "vat"
    perturbation: float = Field(6.0, gt=0)
    """eps: length of the perturbation r of an image."""
    probe: float = Field(1e-3, gt=0)
    """xi: length of the perturbation at which the gradient is taken. Paper: 1e-6. Here: 1e-3, because 1e-6 spread over the
    pixels of an image is below the resolution of float32, and the direction found would be rounding noise."""
    consistency_weight: float = Field(0.3, ge=0)
    entropy_weight: float = Field(0.06, ge=0)
    ramp_share: float = Field(0.4, gt=0, le=1)
    """w(t) rises linearly from 0 to 1 over this share of the run; more slowly in a short one (`Method.ramp`)."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """google-research/fixmatch trains VAT with Adam."""
        return equal_batches(recipe) | (original_optimizer() if recipe in ("paper", "original") else {})

    @property
    def views(self) -> tuple[View, ...]:
        """Weak views of labeled and unlabeled images."""
        return (LABELED, WEAK) if self.consistency_weight or self.entropy_weight else (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms, from four forward passes: labeled, unlabeled, probed and perturbed images."""
        import torch

        from crmatch.losses import cross_entropy, divergence, entropy
        from crmatch.networks.batch_norm import forward_without_bn_update

        student = models.student
        terms = {"supervised": cross_entropy(student(batch.views["labeled"]).logits, batch.labels).mean()}
        weights = {"supervised": 1.0}
        if "weak" not in batch.views:
            return LossTerms(terms, weights)
        images = batch.views["weak"]  # (Bu, C, H, W)
        logits = forward_without_bn_update(student, images).logits
        if self.consistency_weight:
            targets = logits.detach().softmax(dim=1)
            # Adversarial direction g / |g|
            random = torch.randn(images.shape, generator=step.generator("vat")).to(images)
            probe = (self.probe * _unit(random)).requires_grad_()
            divergences = divergence(targets, forward_without_bn_update(student, images + probe).logits)
            (gradient,) = torch.autograd.grad(divergences.mean(), probe)
            perturbed = images + self.perturbation * _unit(gradient)
            terms["consistency"] = divergence(targets, forward_without_bn_update(student, perturbed).logits).mean()
            weights["consistency"] = self.consistency_weight * self.ramp(self.ramp_share * self.reference_steps, step)
        if self.entropy_weight:
            terms["entropy"] = entropy(logits).mean()
            weights["entropy"] = self.entropy_weight
        return LossTerms(terms, weights, pseudo_labels=PseudoLabels.all_used(logits.detach()))


def _unit(values: Tensor) -> Tensor:
    """Each image of (N, C, H, W) divided by its length; zero stays zero."""
    lengths: Tensor = values.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    return values / lengths.where(lengths > 0, 1.0)
