"""Mean Teacher (Tarvainen and Valpola, NeurIPS 2017): the student agrees with the average of its past selves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, SECOND_WEAK, WEAK, LossTerms, Method, Models, Step, older_recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import NetworkShape

MINI_IMAGENET: dict[str, Any] = {
    "method.consistency_weight": 100,
    "method.ramp_shape": "sigmoid",
    "method.ramp_share": 5 / 180,
    "method.logit_distance_weight": 0.01,
    "plan.steps": None,
    "plan.unlabeled_epochs": 180,
    "plan.labeled_batch_size": 31,
    "plan.unlabeled_batch_size": 97,
    "plan.learning_rate": 0.2,
    "plan.weight_decay": 2e-4,
    "plan.schedule": [{"shape": "half_cosine", "arc": 180 / 210}],
    "plan.ema_decay": 0.97,
    "plan.ema_warmup": "mean",
    "data.unlabeled": "remaining",
    "augmentation.padding": 8,
    "augmentation.padding_mode": "zero",
    "augmentation.rotation": 10.0,
    "network.normalize_features": True,
}
"""The run behind the paper's mini-ImageNet row, by the label-propagation paper's code (spec 4.2): its images and network."""
ORIGINAL_WEIGHTS = {"svhn": 150, "svhn_extra": 180}


class MeanTeacher(Method):
    """L = CE + w(t) * K * mean (softmax_teacher - softmax_student)^2, teacher = moving average of the weights.

    The teacher sees one weak view in training mode, without gradient; the student the other one.
    """

    title: ClassVar = "Mean Teacher"
    summary: ClassVar = "the student's predictions follow those of the moving average of its weights"
    paper: ClassVar = "Tarvainen and Valpola, NeurIPS 2017, arXiv 1703.01780"
    running_statistics: ClassVar = "labeled"

    name: str = "mean_teacher"
    consistency_weight: float = Field(50.0, ge=0)
    ramp_share: float = Field(0.4, gt=0, le=1)
    """Part of the run over which the consistency weight rises."""
    ramp_shape: Literal["linear", "sigmoid"] = "linear"
    """min(1, u), or exp(-5 (1 - min(1, u))^2), u = step / (share * steps)."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    logit_distance_weight: float = Field(0.0, ge=0)
    """Above 0, a second linear head meets the teacher, tied to the classifier by the mean squared difference of logits."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """As many unlabeled as labeled images; weights per data set in `original`."""
        if recipe in ("paper", "original") and setting.stem == "mini_imagenet":
            return MINI_IMAGENET
        original = {
            "method.consistency_weight": ORIGINAL_WEIGHTS.get(setting.data, ORIGINAL_WEIGHTS.get(setting.stem or "", 50)),
            "method.label_smoothing": 0.001,
            "plan.weight_decay": 0.2 if setting.stem == "cifar10" else 0.02,
        }
        return older_recipe(recipe, original)

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images, and two weak views of the unlabeled ones."""
        return (LABELED, WEAK, SECOND_WEAK) if self.consistency_weight else (LABELED,)

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """The second head, where there is one."""
        from crmatch.networks.network import linear_head

        second = self.consistency_weight and self.logit_distance_weight
        return {"consistency": linear_head(shape.features, shape.classes)} if second else {}

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Supervised and consistency terms from three passes: labeled, teacher, student."""
        import torch

        from crmatch.losses import smoothed_cross_entropy, squared_difference
        from crmatch.networks.batch_norm import forward_without_bn_update

        labeled = models.student(batch.views["labeled"])
        terms: dict[str, Tensor] = {
            "supervised": smoothed_cross_entropy(labeled.logits, batch.labels, self.label_smoothing).mean()
        }
        weights = {"supervised": 1.0}
        if not self.consistency_weight:
            return LossTerms(terms, weights)
        with torch.no_grad():
            targets = forward_without_bn_update(models.teacher, batch.views["weak"]).logits.softmax(dim=1)
        student = forward_without_bn_update(models.student, batch.views["second_weak"])
        logits = student.logits
        if self.logit_distance_weight:
            features = torch.cat([labeled.features, student.features])
            second = models.student.head("consistency", features)
            terms["logit_distance"] = (torch.cat([labeled.logits, student.logits]) - second).square().mean()
            weights["logit_distance"] = self.logit_distance_weight
            logits = second[len(labeled.features) :]
        terms["consistency"] = squared_difference(logits, targets)
        weights["consistency"] = self.consistency_weight * self._ramp(step)
        return LossTerms(terms, weights)

    def _ramp(self, step: Step) -> float:
        linear = step.ramp(self.ramp_share * step.total)
        return linear if self.ramp_shape == "linear" else math.exp(-5 * (1 - linear) ** 2)
