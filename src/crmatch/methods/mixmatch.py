"""MixMatch (Berthelot et al., NeurIPS 2019): guess labels, sharpen them, and mix labeled and unlabeled images."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods import base
from crmatch.methods.base import LABELED, SECOND_WEAK, WEAK, LossTerms, Method, Models, PseudoLabels, Step, spec_keys
from crmatch.methods.mixup import draw_mixing

MixedPass = Literal["joint", "interleaved"]
ORIGINAL_WEIGHTS = {"cifar10": 75, "svhn": 250, "cifar100": 150, "stl10": 50}  # google-research/mixmatch


class MixMatch(Method):
    """L = CE(mixed labeled) + w(t) * lambda_u * mean (q' - softmax(mixed unlabeled))^2.

    q is the sharpened mean prediction on two weak views of an image, and q' the mixed q. MixUp mixes the union of labeled and
    unlabeled views, with lam = max(l, 1 - l), l ~ Beta(alpha, alpha), and their labels and guesses in the same way.
    """

    title: ClassVar = "MixMatch"
    summary: ClassVar = "sharpened mean predictions of two weak views, mixed with the labeled images by MixUp"
    paper: ClassVar = "Berthelot et al., NeurIPS 2019, arXiv 1905.02249"
    running_statistics: ClassVar = "mixed"

    name: str = "mixmatch"
    temperature: float = Field(0.5, gt=0)
    mixup_alpha: float = Field(0.5, gt=0)
    share_per: Literal["sample", "batch"] = "sample"
    """Draw lam for each image (google-research/mixmatch), or once per step (USB)."""
    consistency_weight: float = Field(100.0, ge=0)
    ramp_steps: int = Field(16_384, ge=1)
    """w(t) rises linearly from 0 to 1 over so many steps of a run of 2^20 (`Method.ramp`)."""
    mixed_pass: MixedPass = "joint"
    """One forward pass over all mixed images, or one for each third, of which the first updates the running statistics."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """`paper`: google-research/fixmatch; `original`: google-research/mixmatch."""
        if recipe == "usb":
            return base.equal_batches(recipe) | spec_keys("method", ramp_steps=2**20 * 2 // 5, share_per="batch")
        if recipe != "original":
            return base.equal_batches(recipe)
        alpha = 0.25 if setting.data == "svhn_extra" else 0.75
        weight = ORIGINAL_WEIGHTS.get(setting.stem or "", 75)
        method = spec_keys("method", mixup_alpha=alpha, consistency_weight=weight, mixed_pass="interleaved")
        return base.equal_batches(recipe) | base.original_optimizer(0.04 if setting.stem == "cifar100" else 0.02) | method

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images, and two weak views of the unlabeled images."""
        return (LABELED, WEAK, SECOND_WEAK) if self.consistency_weight else (LABELED,)

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Both terms, from one forward pass that guesses labels and one over the N = B + 2 Bu mixed images."""
        import torch

        from crmatch.losses import cross_entropy, sharpen, squared_difference
        from crmatch.networks.batch_norm import forward_interleaved, forward_without_bn_update

        student, images = models.student, torch.cat(list(batch.views.values()))  # (N, C, H, W)
        labeled, classes = len(batch.labels), student.classifier.out_features
        targets = torch.nn.functional.one_hot(batch.labels, classes).to(images.dtype)  # (B, K)

        # Guessed labels q (Bu, K), without gradient, for both views
        pseudo_labels = None
        if self.consistency_weight:
            with torch.no_grad():
                first, second = forward_without_bn_update(student, images[labeled:]).logits.softmax(dim=1).chunk(2)
                guess = sharpen((first + second) / 2, self.temperature)
            targets = torch.cat([targets, guess, guess])  # (N, K)
            pseudo_labels = PseudoLabels.all_used(guess)

        # MixUp of labeled and unlabeled images
        mixing = draw_mixing(images, self.mixup_alpha, step.generator("mixup"), per=self.share_per)
        passes = len(batch.views) if self.mixed_pass == "interleaved" else 1
        logits = forward_interleaved(student, mixing.apply(images), passes)  # (N, K)
        targets = mixing.apply(targets)

        terms = {"supervised": cross_entropy(logits[:labeled], targets[:labeled]).mean()}
        weights = {"supervised": 1.0}
        if self.consistency_weight:
            terms["consistency"] = squared_difference(logits[labeled:], targets[labeled:])
            weights["consistency"] = self.consistency_weight * self.ramp(self.ramp_steps, step)
        return LossTerms(terms, weights, pseudo_labels=pseudo_labels)
