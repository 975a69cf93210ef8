"""PLCB (Arazo et al., IJCNN 2020): pseudo-labeling that MixUp, two regularizers and enough labels keep from fooling itself.

Every unlabeled image has a soft label, which the network wrote down in the epoch before: during an epoch predictions are
kept, at its end all labels are swapped at once. Paper: an epoch is a pass over the images. Here: it has as many steps, but
batches go on through one permutation after the other, so an image may come twice in an epoch and keep its label in the next.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, WEAK, LossTerms, Method, Models, PseudoLabels, Refresh, Step
from crmatch.methods.mixup import draw_mixing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape

PLAIN = (View("plain_labeled", "labeled", "none"), View("plain", "unlabeled", "none"))
EPOCHS = 400
WARMUP_EPOCHS = 10


class PLCB(Method):
    """L = CE(mixed labels, p) + 0.8 R_A + 0.4 R_H, on mixed labeled and unlabeled images alike.

    In the warm-up the images are labeled ones only.
    """

    title: ClassVar = "PLCB"
    summary: ClassVar = "soft labels of the last epoch, MixUp, and regularizers against one-class and undecided answers"
    paper: ClassVar = "Arazo et al., IJCNN 2020, arXiv 1908.02983"
    evaluated: ClassVar = "raw"
    running_statistics: ClassVar = "mixed"
    reference_steps: ClassVar = WARMUP_EPOCHS + EPOCHS
    """Epochs, in which its paper counts."""

    name: str = "plcb"
    warmup_epochs: int = Field(WARMUP_EPOCHS, ge=1, lt=WARMUP_EPOCHS + EPOCHS)
    """Length of the warm-up, of 410 epochs of the whole run; in any run it takes this share."""
    mixup_alpha: float = Field(1.0, gt=0)
    label_images: Literal["augmented", "plain"] = "augmented"
    """The images on which next soft labels are predicted: those of training (mini-ImageNet), or unaugmented (CIFAR)."""
    class_balance_weight: float = Field(0.8, ge=0)
    """Of R_A, lambda_A."""
    entropy_weight: float = Field(0.4, ge=0)
    """Of R_H, lambda_H."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """Batches of 100 with 16 labeled, rate, length, network and weak view of its paper (spec 4.10)."""
        if recipe not in ("paper", "original"):
            return {}
        total = WARMUP_EPOCHS + EPOCHS
        lengths = (WARMUP_EPOCHS + 250, 100, 50)
        schedule = [{"share": length / total, "start": 10.0**-drop} for drop, length in enumerate(lengths)]
        keys: dict[str, Any] = {
            "data.unlabeled": "remaining",
            "plan.steps": None,
            "plan.unlabeled_epochs": total,
            "plan.labeled_batch_size": 16,
            "plan.unlabeled_batch_size": 84,
            "plan.learning_rate": 0.1,
            "plan.nesterov": False,
            "plan.weight_decay": 1e-4,
            "plan.schedule": schedule,
            "headline": "last",
        }
        if setting.stem == "mini_imagenet":
            keys |= {"augmentation.padding": 6, "augmentation.jitter": True}
        elif setting.stem in ("cifar10", "cifar100"):
            keys |= {"augmentation.padding": 2, "method.label_images": "plain"}
        if setting.defaults.network == "resnet-18":
            keys |= {"network.weight_norm": True, "network.dropout": 0.1}
        return keys

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term, those of exactly 0 left out."""
        weights = {"mixed": 1.0, "class_balance": self.class_balance_weight, "entropy": self.entropy_weight}
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled and unlabeled images, augmented alike, and where asked for the images themselves."""
        return (LABELED, WEAK, *(PLAIN if self.label_images == "plain" else ()))

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """Soft labels of every unlabeled image: those of this epoch, and those of the next as far as known."""
        import torch

        from crmatch.networks.network import RunningState

        uniform = torch.full((shape.unlabeled, shape.classes), 1 / shape.classes)
        return {"memory": RunningState(labels=uniform, next_labels=uniform.clone())}

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms on the mixed images; on the way, the soft labels of the next epoch."""
        import torch
        import torch.nn.functional as F  # noqa: N812

        student = models.student
        memory = student.state("memory")
        images, labels = batch.views["labeled"], F.one_hot(batch.labels, memory["labels"].shape[1])
        targets = labels.to(memory["labels"].dtype)
        pseudo_labels = None
        if step.number >= self.refresh_start(step.total):
            current = memory["labels"][batch.unlabeled]
            images, targets = torch.cat([images, batch.views["weak"]]), torch.cat([targets, current])
            pseudo_labels = PseudoLabels(current.argmax(dim=1), torch.ones_like(current[:, 0]))
            memory["next_labels"][batch.unlabeled] = self._predictions(batch, student)
        mixing = draw_mixing(
            len(images), self.mixup_alpha, step.generator("mixup"), images.device, per="batch", keep_larger=False
        )
        logits = student(mixing.apply(images)).logits
        return LossTerms(self._terms(logits, mixing.apply(targets)), self.weights, pseudo_labels=pseudo_labels)

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Every pass over the unlabeled images."""
        return steps_per_epoch

    def refresh_start(self, total_steps: int) -> int:
        """The first step after the warm-up."""
        return self.scaled(self.warmup_epochs, total_steps)

    def refresh(self, context: Refresh) -> None:
        """Swap the labels at the end of an epoch; the first ones are predictions of the warmed-up network in eval mode."""
        memory = context.models.student.state("memory")
        if context.step.number == self.refresh_start(context.step.total):
            memory["next_labels"].copy_(context.features("unlabeled")[1])
        memory["labels"].copy_(memory["next_labels"])

    def _predictions(self, batch: Batch, student: Network) -> Tensor:
        """What the network says of the unlabeled images now, with batch statistics, without dropout and gradient.

        Paper: this pass also moves the running statistics of batch norms. Here: only the mixed pass does, because the
        evaluated network should have the statistics of what it is trained on.
        """
        import torch

        from crmatch.networks.batch_norm import forward_without_bn_update
        from crmatch.networks.dropout import dropout_from

        names = [view.name for view in (PLAIN if self.label_images == "plain" else (LABELED, WEAK))]
        with torch.no_grad(), dropout_from(student, None):
            logits = forward_without_bn_update(student, torch.cat([batch.views[name] for name in names])).logits
        return logits[len(batch.labels) :].softmax(dim=1)

    def _terms(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The terms that have a weight, of the mixed images' logits and labels.

        mixed          lam CE(y_a) + (1 - lam) CE(y_b), which is CE of the mixed labels
        class_balance  R_A = -(1/K) sum_c log mean_i p_ic, up to a constant KL(uniform || mean prediction)
        entropy        R_H = -mean_i sum_c p_ic log p_ic
        """
        from crmatch.losses import cross_entropy

        logs = logits.log_softmax(dim=1)
        terms = {
            "mixed": cross_entropy(logits, targets).mean(),
            "class_balance": math.log(len(logs)) - logs.logsumexp(dim=0).mean(),
            "entropy": -(logs.exp() * logs).sum(dim=1).mean(),
        }
        return {name: terms[name] for name in self.weights}
