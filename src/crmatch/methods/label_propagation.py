"""Deep label propagation (Iscen et al., CVPR 2019): train on the labels, spread them over a graph of features, train on all.

Half of a run is supervised. In the other half, before every pass over the unlabeled images, labels are propagated anew
(`propagation.py`) and every image counts as far as its label is certain and its class is rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, WEAK, LossTerms, Method, Models, PseudoLabels, Refresh, Step

if TYPE_CHECKING:
    from torch import nn

    from crmatch.networks.network import NetworkShape

EPOCHS_PER_STAGE = 180
COSINE_EPOCHS = 210
"""The cosine of the learning rate would reach 0 after so many epochs; each stage ends before."""


class LabelPropagation(Method):
    """L = (1/B) sum_i omega_i zeta_{yhat_i} CE(yhat_i, logits_i) over the B labeled and unlabeled images of a batch.

    The labeled and the unlabeled images of the sum are two terms. Before the first propagation the batch has labeled
    images only, and each of them counts as 1.
    """

    title: ClassVar = "Label propagation"
    summary: ClassVar = "labels spread over a nearest-neighbor graph of the features, anew before every epoch"
    paper: ClassVar = "Iscen et al., CVPR 2019, arXiv 1904.04717"
    evaluated: ClassVar = "raw"
    reference_steps: ClassVar = 2 * EPOCHS_PER_STAGE
    """Epochs, in which its paper counts."""

    name: str = "label_propagation"
    supervised_epochs: int = Field(EPOCHS_PER_STAGE, ge=1, lt=2 * EPOCHS_PER_STAGE)
    """Length of the supervised stage, of 360 epochs of the whole run; in any run it takes this share."""
    neighbors: int = Field(50, ge=1)
    """k of the nearest-neighbor graph."""
    similarity_power: float = Field(3.0, gt=0)
    """gamma, to which similarities are raised."""
    diffusion: float = Field(0.99, ge=0, lt=1)
    """alpha: how much of an image's label comes from its neighbors."""
    solver_iterations: int = Field(20, ge=1)
    solver_tolerance: float = Field(1e-6, ge=0)
    supervised_weight: float = Field(1.0, gt=0)
    pseudo_label_weight: float = Field(1.0, ge=0)

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """Two stages with a learning rate that starts again; batches, rate and network of its paper (spec 4.9)."""
        stage = {"share": 0.5, "shape": "half_cosine", "arc": EPOCHS_PER_STAGE / COSINE_EPOCHS}
        keys: dict[str, Any] = {"plan.schedule": [stage, stage]}
        if recipe not in ("paper", "original"):
            return keys  # `quick` keeps the two-stage schedule: the second stage starts from the rate of the first
        small = setting.stem == "cifar10"
        keys |= {
            "data.unlabeled": "remaining",
            "plan.steps": None,
            "plan.unlabeled_epochs": 2 * EPOCHS_PER_STAGE,
            "plan.labeled_batch_size": 50 if small else 31,
            "plan.unlabeled_batch_size": 50 if small else 97,
            "plan.learning_rate": 0.05 if small else 0.2,
            "plan.weight_decay": 2e-4,
            "network.normalize_features": True,
            "headline": "last",
        }
        if setting.stem == "mini_imagenet":
            keys |= {"augmentation.padding": 8, "augmentation.padding_mode": "zero", "augmentation.rotation": 10.0}
        return keys

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term, those of exactly 0 left out."""
        weights = {"supervised": self.supervised_weight, "pseudo_label": self.pseudo_label_weight}
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled and unlabeled images, augmented alike."""
        return (LABELED, WEAK) if "pseudo_label" in self.weights else (LABELED,)

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """What the last propagation found: yhat and omega of every unlabeled image, zeta of every class."""
        import torch

        from crmatch.networks.network import RunningState

        if "pseudo_label" not in self.weights:
            return {}
        return {
            "memory": RunningState(
                labels=torch.zeros(shape.unlabeled, dtype=torch.int64),
                certainty=torch.zeros(shape.unlabeled),
                class_weights=torch.ones(shape.classes),
            )
        }

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Cross-entropy of the labeled images, and from the first propagation on of all images, weighted."""
        from crmatch.losses import cross_entropy
        from crmatch.networks.network import forward_together

        student = models.student
        if "pseudo_label" not in self.weights or step.number < self.refresh_start(step.total):
            logits = student(batch.views["labeled"]).logits
            return LossTerms({"supervised": cross_entropy(logits, batch.labels).mean()}, {"supervised": self.supervised_weight})
        outputs = forward_together(student, batch.views)
        memory = student.state("memory")
        labels, certainty = memory["labels"][batch.unlabeled], memory["certainty"][batch.unlabeled]
        rarity = memory["class_weights"]
        images = len(batch.labels) + len(labels)
        supervised = rarity[batch.labels] * cross_entropy(outputs["labeled"].logits, batch.labels)
        pseudo_label = certainty * rarity[labels] * cross_entropy(outputs["weak"].logits, labels)
        terms = {"supervised": supervised.sum() / images, "pseudo_label": pseudo_label.sum() / images}
        return LossTerms(terms, self.weights, pseudo_labels=PseudoLabels(labels, certainty))

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Every pass over the unlabeled images."""
        return steps_per_epoch if "pseudo_label" in self.weights else None

    def refresh_start(self, total_steps: int) -> int:
        """The first step of the second stage."""
        return self.scaled(self.supervised_epochs, total_steps)

    def refresh(self, context: Refresh) -> None:
        """Propagate the labels over the features of all images, which are augmented as in training."""
        import torch

        from crmatch.methods.propagation import propagate

        labeled, _ = context.features("labeled", "weak")
        unlabeled, _ = context.features("unlabeled", "weak")
        memory = context.models.student.state("memory")
        propagated = propagate(
            torch.cat([labeled, unlabeled]),
            torch.cat([context.labels, torch.full_like(memory["labels"], -1)]),
            len(memory["class_weights"]),
            neighbors=self.neighbors,
            power=self.similarity_power,
            alpha=self.diffusion,
            iterations=self.solver_iterations,
            tolerance=self.solver_tolerance,
        )
        memory["labels"].copy_(propagated.labels[len(labeled) :])
        memory["certainty"].copy_(propagated.certainty[len(labeled) :])
        memory["class_weights"].copy_(propagated.class_weights)
