"""MixMatch (Berthelot et al., NeurIPS 2019): guess labels, sharpen them, mix everything with everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import (
    LABELED,
    ONE_UNLABELED_EACH,
    SECOND_WEAK,
    WEAK,
    LossTerms,
    Method,
    Models,
    Step,
    original_optimizer,
)
from crmatch.methods.mixup import draw_mixing

if TYPE_CHECKING:
    from torch import Tensor

    from crmatch.networks.network import Network

MixedPass = Literal["joint", "interleaved"]
ORIGINAL_WEIGHTS = {"cifar10": 75, "svhn": 250, "cifar100": 150, "stl10": 50}


class MixMatch(Method):
    """L = CE(mixed labeled) + w(t) * lambda_u * mean (q' - softmax(mixed unlabeled))^2.

    q is the mean prediction on two weak views, sharpened; labels and q are mixed as their images are, over the union of
    labeled and unlabeled views, with lam ~ Beta(alpha, alpha), at least 1/2.
    """

    title: ClassVar = "MixMatch"
    summary: ClassVar = "sharpened mean predictions of two weak views, mixed with the labeled images by MixUp"
    paper: ClassVar = "Berthelot et al., NeurIPS 2019, arXiv 1905.02249"
    running_statistics: ClassVar = "mixed"

    name: str = "mixmatch"
    temperature: float = Field(0.5, gt=0)
    mixup_alpha: float = Field(0.5, gt=0)
    share_per: Literal["sample", "batch"] = "sample"
    """One lam for each image (Google's code), or one for all of a step (USB)."""
    consistency_weight: float = Field(100.0, ge=0)
    ramp_steps: int = Field(16_384, ge=1)
    """Steps over which the consistency weight rises, in a run of 2^20."""
    mixed_pass: MixedPass = "joint"
    """One pass over all mixed images, or one for each third of them, of which the first moves the running statistics."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """As many unlabeled as labeled images; the numbers of MixMatch's own paper in `original`."""
        usb_ramp = {"method.ramp_steps": 2**20 * 2 // 5}
        if recipe == "quick":
            # In proportion the weight would reach 100 after 16 of 1,000 steps, when guesses are still random: it collapses.
            return usb_ramp
        if recipe == "usb":
            return ONE_UNLABELED_EACH | usb_ramp | {"method.share_per": "batch"}
        if recipe == "paper":
            return ONE_UNLABELED_EACH
        chosen = {
            "method.mixup_alpha": 0.25 if setting.data == "svhn_extra" else 0.75,
            "method.consistency_weight": ORIGINAL_WEIGHTS.get(setting.stem or "", 75),
            "method.mixed_pass": "interleaved",
        }
        return ONE_UNLABELED_EACH | original_optimizer(0.04 if setting.stem == "cifar100" else 0.02) | chosen

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images, and two weak views of the unlabeled ones."""
        return (LABELED, WEAK, SECOND_WEAK) if self.consistency_weight else (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Guess in one pass, mix, and predict the mixtures."""
        import torch

        from crmatch.losses import cross_entropy, squared_difference

        images = torch.cat(list(batch.views.values()))
        classes = models.student.classifier.out_features
        targets = torch.nn.functional.one_hot(batch.labels, classes).to(images.dtype)
        if self.consistency_weight:
            guess = self._guess(models.student, batch)
            targets = torch.cat([targets, guess, guess])
        generator = step.generator("mixup")
        mixing = draw_mixing(len(images), self.mixup_alpha, generator, images.device, per=self.share_per)
        logits = predict_mixed(models.student, mixing.apply(images), len(batch.views), self.mixed_pass)
        targets, labeled = mixing.apply(targets), len(batch.labels)
        terms = {"supervised": cross_entropy(logits[:labeled], targets[:labeled]).mean()}
        weights = {"supervised": 1.0}
        if self.consistency_weight:
            terms["consistency"] = squared_difference(logits[labeled:], targets[labeled:])
            weights["consistency"] = self.consistency_weight * step.ramp(self.scaled(self.ramp_steps, step.total))
        return LossTerms(terms, weights)

    def _guess(self, student: Network, batch: Batch) -> Tensor:
        """Sharpened mean over the two views of softmax, without gradient: (Bu, K)."""
        import torch

        from crmatch.losses import sharpen
        from crmatch.networks.batch_norm import forward_without_bn_update

        views = torch.cat([batch.views["weak"], batch.views["second_weak"]])
        with torch.no_grad():
            first, second = forward_without_bn_update(student, views).logits.softmax(dim=1).chunk(2)
            return sharpen((first + second) / 2, self.temperature)


def predict_mixed(student: Network, images: Tensor, groups: int, mixed_pass: MixedPass) -> Tensor:
    """Logits of mixed images from one pass, or from `groups` interleaved ones."""
    from crmatch.networks.batch_norm import forward_interleaved

    return student(images).logits if mixed_pass == "joint" else forward_interleaved(student, images, groups)
