"""PLCB (Arazo et al., IJCNN 2020): soft pseudo-labels, with MixUp and two regularizers against confirmation bias.

Each unlabeled image has a soft label, predicted in the previous epoch; the predictions of an epoch replace all labels at its
end. Paper: an epoch is one pass over the images. Here: an epoch has as many steps, but batches are taken from consecutive
permutations, so an image can occur twice in an epoch, or not at all and then keeps its label.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, FirstStage, View
from crmatch.data.settings import Setting
from crmatch.methods.base import (
    LABELED,
    QUICK_LABELED_BATCH,
    WEAK,
    LossTerms,
    Method,
    Models,
    PseudoLabels,
    Refresh,
    Step,
    drop_zeros,
    spec_keys,
)
from crmatch.methods.mixup import draw_mixing

if TYPE_CHECKING:
    from torch import nn

    from crmatch.networks.network import NetworkShape

PLAIN = (View("plain_labeled", "labeled", "none"), View("plain", "unlabeled", "none"))
EPOCHS = 400


class PLCB(Method):
    """L = CE(mixed labels, p) + 0.8 R_A + 0.4 R_H on the mixed images, labeled and unlabeled.

    R_A = -(1/K) sum_k log(mean_i p_ik): KL(uniform || mean prediction) up to a constant, against predicting few classes.
    R_H = -mean_i sum_k p_ik log p_ik: entropy, against undecided predictions. The warm-up uses labeled images only.
    """

    title: ClassVar = "PLCB"
    summary: ClassVar = "soft labels of the last epoch, MixUp, and regularizers against collapsed and undecided predictions"
    paper: ClassVar = "Arazo et al., IJCNN 2020, arXiv 1908.02983"
    evaluated: ClassVar = "raw"
    running_statistics: ClassVar = "mixed"

    name: str = "plcb"
    warmup_epochs: int = Field(10, ge=1)
    """Length of the warm-up in passes over the labeled images; at most half of the run."""
    warmup_batch_size: int = Field(100, ge=1)
    """Labeled images in a batch of the warm-up."""
    mixup_alpha: float = Field(1.0, gt=0)
    label_images: Literal["augmented", "plain"] = "augmented"
    """Images on which the next soft labels are predicted: with augmentation (mini-ImageNet), or without it (CIFAR)."""
    class_balance_weight: float = Field(0.8, ge=0)
    """lambda_A: weight of R_A."""
    entropy_weight: float = Field(0.4, ge=0)
    """lambda_H: weight of R_H."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """EricArazo/PseudoLabeling: batches of 100 with 16 labeled images, learning rate / 10 at epochs 250 and 350."""
        if recipe == "quick":
            # Ten passes over 250 labels are 150 steps, after which the first soft labels would be noise.
            return spec_keys("method", warmup_epochs=100, warmup_batch_size=QUICK_LABELED_BATCH)
        if recipe == "usb":
            return {}
        schedule = [{"share": length / EPOCHS, "start": 10.0**-drop} for drop, length in enumerate((250, 100, 50))]
        keys = (
            spec_keys("plan", steps=None, unlabeled_epochs=EPOCHS, labeled_batch_size=16, unlabeled_batch_size=84)
            | spec_keys("plan", learning_rate=0.1, nesterov=False, weight_decay=1e-4, schedule=schedule)
            | spec_keys("plan", decay_parameters="all")
            | {"data.unlabeled": "remaining", "headline": "last"}
        )
        if setting.stem == "mini_imagenet":
            keys |= spec_keys("augmentation", padding=6, jitter=True)
        elif setting.stem in ("cifar10", "cifar100"):
            keys |= {"augmentation.padding": 2, "method.label_images": "plain"}
        return keys | (spec_keys("network", weight_norm=True, dropout=0.1) if setting.defaults.network == "resnet-18" else {})

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term in the total; terms with weight 0 are left out."""
        return drop_zeros(mixed=1.0, class_balance=self.class_balance_weight, entropy=self.entropy_weight)

    @property
    def views(self) -> tuple[View, ...]:
        """Weak views of labeled and unlabeled images, and the images without augmentation if labels are predicted on them."""
        return (LABELED, WEAK, *(PLAIN if self.label_images == "plain" else ()))

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """Soft labels (N, K) of all unlabeled images: those of this epoch, and those predicted for the next one."""
        import torch

        from crmatch.networks.network import RunningState

        uniform = torch.full((shape.unlabeled, shape.classes), 1 / shape.classes)
        return {"memory": RunningState(labels=uniform, next_labels=uniform.clone())}

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms on the mixed images; also predicts the soft labels of the next epoch."""
        import torch

        from crmatch.losses import cross_entropy
        from crmatch.networks.batch_norm import forward_without_bn_update
        from crmatch.networks.dropout import dropout_from

        student, views = models.student, batch.views
        memory, labeled, pseudo_labels = student.state("memory"), len(batch.labels), None
        images = views["labeled"]
        targets = torch.nn.functional.one_hot(batch.labels, memory["labels"].shape[1]).to(memory["labels"].dtype)
        if "weak" in views:  # after the warm-up
            current = memory["labels"][batch.unlabeled]  # (Bu, K)
            pseudo_labels = PseudoLabels.all_used(current)

            # Soft labels of the next epoch, with batch statistics and without dropout. Paper: this pass also updates the
            # running statistics. Here: only the pass over mixed images does, because the network is trained on those.
            names = [view.name for view in (PLAIN if self.label_images == "plain" else (LABELED, WEAK))]
            with torch.no_grad(), dropout_from(student, None):
                logits = forward_without_bn_update(student, torch.cat([views[name] for name in names])).logits
            memory["next_labels"][batch.unlabeled] = logits[labeled:].softmax(dim=1)
            images, targets = torch.cat([images, views["weak"]]), torch.cat([targets, current])

        # MixUp with one share lam per batch: lam CE(y_a) + (1 - lam) CE(y_b) is the cross-entropy of the mixed labels.
        mixing = draw_mixing(images, self.mixup_alpha, step.generator("mixup"), per="batch", keep_larger=False)
        logits = student(mixing.apply(images)).logits
        logs = logits.log_softmax(dim=1)  # log p_ik
        terms = {
            "mixed": cross_entropy(logits, mixing.apply(targets)).mean(),
            "class_balance": math.log(len(logs)) - logs.logsumexp(dim=0).mean(),  # R_A
            "entropy": -(logs.exp() * logs).sum(dim=1).mean(),  # R_H
        }
        return LossTerms({name: terms[name] for name in self.weights}, self.weights, pseudo_labels=pseudo_labels)

    def first_stage(self, labeled: int) -> FirstStage:
        """The warm-up: passes over the labeled images in batches of labeled images only."""
        return FirstStage.of_passes(self.warmup_epochs, self.warmup_batch_size, labeled)

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Once per epoch after the warm-up."""
        return steps_per_epoch

    def refresh(self, context: Refresh) -> None:
        """Replace all labels by those predicted in the last epoch; the first are predictions after the warm-up in eval mode."""
        memory = context.models.student.state("memory")
        if context.step.number == self.refresh_start(context.step):
            memory["next_labels"].copy_(context.features("unlabeled")[1])
        memory["labels"].copy_(memory["next_labels"])
