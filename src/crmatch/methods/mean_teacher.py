"""Mean Teacher (Tarvainen and Valpola, NeurIPS 2017): the student agrees with the moving average of its weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import (
    LABELED,
    SECOND_WEAK,
    WEAK,
    LossTerms,
    Method,
    Models,
    PseudoLabels,
    Step,
    older_recipe,
    spec_keys,
)

if TYPE_CHECKING:
    from torch import nn

    from crmatch.networks.network import NetworkShape

# The mini-ImageNet rows of the CR-Match paper stem from the label propagation paper (Iscen et al., CVPR 2019). Its code,
# ahmetius/LP-DeepSSL, trains for 180 epochs with 31 labeled images in each batch of 128.
MINI_IMAGENET = (
    spec_keys("plan", steps=None, unlabeled_epochs=180, labeled_batch_size=31, unlabeled_batch_size=97)
    | spec_keys("plan", learning_rate=0.2, weight_decay=2e-4, schedule=[{"shape": "half_cosine", "arc": 180 / 210}])
    | spec_keys("plan", ema_decay=0.97, ema_warmup="mean", decay_parameters="all")
    | spec_keys("method", consistency_weight=100, ramp_shape="sigmoid", ramp_share=5 / 180, logit_distance_weight=0.01)
    | spec_keys("method", joint_batch=True)
    | spec_keys("augmentation", padding=8, padding_mode="zero", rotation=10.0)
    | {"data.unlabeled": "remaining"}
)
SECOND_LABELED = View("second_labeled", "labeled", "weak")
ORIGINAL_WEIGHTS = {"svhn": 150, "svhn_extra": 180}  # google-research/mixmatch


class MeanTeacher(Method):
    """L = CE + w(t) * lambda * mean (softmax_teacher - softmax_student)^2 on two weak views of the unlabeled images.

    The teacher, a moving average of the student's weights, predicts one view in training mode and without gradient.
    """

    title: ClassVar = "Mean Teacher"
    summary: ClassVar = "the student's predictions follow those of the moving average of its weights"
    paper: ClassVar = "Tarvainen and Valpola, NeurIPS 2017, arXiv 1703.01780"
    running_statistics: ClassVar = "labeled"

    name: str = "mean_teacher"
    consistency_weight: float = Field(50.0, ge=0)
    ramp_share: float = Field(0.4, gt=0, le=1)
    """w(t) rises from its first value to 1 over this share of the run; a linear one more slowly in a short run
    (`Method.ramp`)."""
    ramp_shape: Literal["linear", "sigmoid"] = "linear"
    """w(t) = u or exp(-5 (1 - u)^2), where u = min(1, step / (share * steps))."""
    joint_batch: bool = False
    """As LP-DeepSSL: labeled and unlabeled images pass together, the consistency term has all of them, and the cross-entropy is
    the sum over the labeled images divided by the number of all."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    logit_distance_weight: float = Field(0.0, ge=0)
    """Above 0, a second linear head predicts what is compared with the teacher. The weight is that of the mean squared
    difference between the logits of the two heads."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """`original`: google-research/mixmatch."""
        if recipe in ("paper", "original") and setting.stem == "mini_imagenet":
            return MINI_IMAGENET
        weight = ORIGINAL_WEIGHTS.get(setting.data, ORIGINAL_WEIGHTS.get(setting.stem or "", 50))
        original = spec_keys("method", consistency_weight=weight, label_smoothing=0.001)
        return older_recipe(recipe, original | {"plan.weight_decay": 0.2 if setting.stem == "cifar10" else 0.02})

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images, and two weak views of the unlabeled images; with `joint_batch` also two of the labeled ones."""
        if not self.consistency_weight:
            return (LABELED,)
        return (LABELED, WEAK, SECOND_WEAK, *((SECOND_LABELED,) if self.joint_batch else ()))

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """The second linear head, if it has a weight."""
        from torch import nn

        second = self.consistency_weight and self.logit_distance_weight
        return {"consistency": nn.Linear(shape.features, shape.classes)} if second else {}

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms, from three forward passes: student on labeled images, teacher, student on unlabeled images.

        With `joint_batch` there are two, of student and teacher, over all images.
        """
        import torch

        from crmatch.losses import cross_entropy, squared_difference
        from crmatch.networks.batch_norm import forward_without_bn_update

        views, count = batch.views, len(batch.labels)
        joint = self.joint_batch and "weak" in views
        student = models.student(torch.cat([views["labeled"], views["second_weak"]]) if joint else views["labeled"])
        logits, features = student.logits, student.features  # of the labeled images, then of the unlabeled ones
        errors = cross_entropy(logits[:count], batch.labels, self.label_smoothing)
        terms, weights = {"supervised": errors.sum() / len(logits)}, {"supervised": 1.0}
        if "weak" not in views:
            return LossTerms(terms, weights)
        with torch.no_grad():
            images = torch.cat([views["second_labeled"], views["weak"]]) if joint else views["weak"]
            targets = forward_without_bn_update(models.teacher, images).logits.softmax(dim=1)
        if not joint:
            unlabeled = forward_without_bn_update(models.student, views["second_weak"])
            logits, features = torch.cat([logits, unlabeled.logits]), torch.cat([features, unlabeled.features])
        if self.logit_distance_weight:
            second = models.student.head("consistency", features)  # (B + Bu, K)
            terms["logit_distance"] = (logits - second).square().mean()
            weights["logit_distance"] = self.logit_distance_weight
            logits = second
        terms["consistency"] = squared_difference(logits[-len(targets) :], targets)
        if self.ramp_shape == "linear":
            ramp = self.ramp(self.ramp_share * self.reference_steps, step)
        else:
            ramp = math.exp(-5 * (1 - step.ramp(self.ramp_share * step.total)) ** 2)
        weights["consistency"] = self.consistency_weight * ramp
        return LossTerms(terms, weights, pseudo_labels=PseudoLabels.all_used(targets[-len(batch.unlabeled) :]))
