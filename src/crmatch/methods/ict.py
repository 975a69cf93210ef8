"""Interpolation consistency training (Verma et al., IJCAI 2019): mixed images get mixed predictions."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, WEAK, LossTerms, Method, Models, PseudoLabels, Step, older_recipe, spec_keys
from crmatch.methods.mixup import draw_mixing


class ICT(Method):
    """L = CE + w(t) * lambda * mean (mix(softmax_teacher(u)) - softmax_student(mix(u)))^2.

    mix(u) = lam * u + (1 - lam) * (u in reverse order), with lam = max(l, 1 - l), l ~ Beta(alpha, alpha) for each image.
    """

    title: ClassVar = "ICT"
    summary: ClassVar = "a mixture of two images gets the mixture of the teacher's predictions"
    paper: ClassVar = "Verma et al., IJCAI 2019, arXiv 1903.03825"
    running_statistics: ClassVar = "labeled"

    name: str = "ict"
    mixup_alpha: float = Field(0.5, gt=0)
    consistency_weight: float = Field(50.0, ge=0)
    ramp_share: float = Field(0.4, gt=0, le=1)
    """w(t) rises linearly from 0 to 1 over this share of the run; more slowly in a short one (`Method.ramp`)."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """`original`: google-research/mixmatch."""
        weight, alpha = {"cifar10": (1000, 0.75), "svhn": (20, 0.5)}.get(setting.stem or "", (50, 0.5))
        return older_recipe(recipe, spec_keys("method", consistency_weight=weight, mixup_alpha=alpha))

    @property
    def views(self) -> tuple[View, ...]:
        """Weak views of labeled and unlabeled images."""
        return (LABELED, WEAK) if self.consistency_weight else (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Both terms, from three forward passes: student on labeled images, teacher on images, student on mixed images."""
        import torch

        from crmatch.losses import cross_entropy, squared_difference
        from crmatch.networks.batch_norm import forward_without_bn_update

        terms = {"supervised": cross_entropy(models.student(batch.views["labeled"]).logits, batch.labels).mean()}
        weights, pseudo_labels = {"supervised": 1.0}, None
        if self.consistency_weight:
            images = batch.views["weak"]
            mixing = draw_mixing(images, self.mixup_alpha, step.generator("mixup"), partner="reversed")
            with torch.no_grad():
                targets = forward_without_bn_update(models.teacher, images).logits.softmax(dim=1)  # (Bu, K)
            logits = forward_without_bn_update(models.student, mixing.apply(images)).logits
            terms["consistency"] = squared_difference(logits, mixing.apply(targets))
            weights["consistency"] = self.consistency_weight * self.ramp(self.ramp_share * self.reference_steps, step)
            pseudo_labels = PseudoLabels.all_used(targets)
        return LossTerms(terms, weights, pseudo_labels=pseudo_labels)
