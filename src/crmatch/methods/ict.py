"""Interpolation consistency training (Verma et al., IJCAI 2019): a mixture of images gets the mixture of predictions."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, WEAK, LossTerms, Method, Models, Step, older_recipe
from crmatch.methods.mixup import draw_mixing


class ICT(Method):
    """L = CE + w(t) * K * mean (mix(softmax_teacher(u)) - softmax_student(mix(u)))^2.

    mix is lam * u + (1 - lam) * u in reverse order, lam ~ Beta(alpha, alpha), at least 1/2, one for each image.
    """

    title: ClassVar = "ICT"
    summary: ClassVar = "a mixture of two images gets the mixture of the teacher's predictions"
    paper: ClassVar = "Verma et al., IJCAI 2019, arXiv 1903.03825"
    running_statistics: ClassVar = "labeled"

    name: str = "ict"
    mixup_alpha: float = Field(0.5, gt=0)
    consistency_weight: float = Field(50.0, ge=0)
    ramp_share: float = Field(0.4, gt=0, le=1)
    """Part of the run over which the consistency weight rises."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """As many unlabeled as labeled images; weights per data set in `original`."""
        weight, alpha = {"cifar10": (1000, 0.75), "svhn": (20, 0.5)}.get(setting.stem or "", (50, 0.5))
        return older_recipe(recipe, {"method.consistency_weight": weight, "method.mixup_alpha": alpha})

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled and unlabeled images, weakly augmented."""
        return (LABELED, WEAK) if self.consistency_weight else (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Three passes: labeled, teacher on the images, student on their mixtures."""
        import torch

        from crmatch.losses import cross_entropy, squared_difference
        from crmatch.networks.batch_norm import forward_without_bn_update

        terms = {"supervised": cross_entropy(models.student(batch.views["labeled"]).logits, batch.labels).mean()}
        weights = {"supervised": 1.0}
        if self.consistency_weight:
            images = batch.views["weak"]
            generator = step.generator("mixup")
            mixing = draw_mixing(len(images), self.mixup_alpha, generator, images.device, partner="reversed")
            with torch.no_grad():
                targets = forward_without_bn_update(models.teacher, images).logits.softmax(dim=1)
            logits = forward_without_bn_update(models.student, mixing.apply(images)).logits
            terms["consistency"] = squared_difference(logits, mixing.apply(targets))
            weights["consistency"] = self.consistency_weight * step.ramp(self.ramp_share * step.total)
        return LossTerms(terms, weights)
