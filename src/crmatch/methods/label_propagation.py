"""Deep label propagation (Iscen et al., CVPR 2019): labels spread over a nearest-neighbor graph of the features.

The first stage of a run is supervised, with batches of labeled images only. In the second stage, labels are propagated before
every epoch (propagation.py), and all images are trained on, weighted by the certainty of their label and by the rarity of their
class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

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

if TYPE_CHECKING:
    from torch import nn

    from crmatch.networks.network import NetworkShape

EPOCHS_PER_STAGE = 180
COSINE_EPOCHS = 210
"""The cosine of the learning rate would reach 0 at this epoch; each stage ends before."""


class LabelPropagation(Method):
    """L = (1/N) sum_i omega_i zeta_{y_i} CE(y_i, logits_i) over the N = B + Bu images of a batch.

    y_i is the true or propagated label, omega_i its certainty (1 for labeled images), zeta_k the weight of class k. Labeled and
    unlabeled images are two terms. The first stage has only labeled images, all with weight 1.
    """

    title: ClassVar = "Label propagation"
    summary: ClassVar = "labels spread over a nearest-neighbor graph of the features, recomputed before every epoch"
    paper: ClassVar = "Iscen et al., CVPR 2019, arXiv 1904.04717"
    evaluated: ClassVar = "raw"

    name: str = "label_propagation"
    supervised_epochs: int = Field(EPOCHS_PER_STAGE, ge=1)
    """Length of the first stage in passes over the labeled images; at most half of the run."""
    supervised_batch_size: int = Field(128, ge=1)
    """Labeled images in a batch of the first stage."""
    neighbors: int = Field(50, ge=1)
    """k of the nearest-neighbor graph."""
    similarity_power: float = Field(3.0, gt=0)
    """gamma: exponent of the similarities."""
    diffusion: float = Field(0.99, ge=0, lt=1)
    """alpha: how much of an image's label comes from its neighbors."""
    solver_iterations: int = Field(20, ge=1)
    solver_tolerance: float = Field(1e-6, ge=0)
    supervised_weight: float = Field(1.0, gt=0)
    pseudo_label_weight: float = Field(1.0, ge=0)

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """ahmetius/LP-DeepSSL: two stages of 180 epochs, each with its own cosine; batches of 100 or 128."""
        keys = spec_keys("plan", schedule=[{"shape": "half_cosine", "arc": EPOCHS_PER_STAGE / COSINE_EPOCHS}])
        if recipe == "quick":
            return keys | spec_keys("method", supervised_batch_size=QUICK_LABELED_BATCH)
        if recipe == "usb":
            return keys
        labeled, unlabeled, rate = (50, 50, 0.05) if setting.stem == "cifar10" else (31, 97, 0.2)
        keys |= spec_keys("plan", labeled_batch_size=labeled, unlabeled_batch_size=unlabeled, learning_rate=rate)
        keys |= spec_keys("plan", steps=None, unlabeled_epochs=EPOCHS_PER_STAGE, weight_decay=2e-4, decay_parameters="all")
        keys |= spec_keys("method", supervised_batch_size=labeled + unlabeled)
        keys |= {"data.unlabeled": "remaining", "network.normalize_features": True, "headline": "last"}
        if setting.stem == "mini_imagenet":
            keys |= spec_keys("augmentation", padding=8, padding_mode="zero", rotation=10.0)
        return keys

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term in the total; terms with weight 0 are left out."""
        return drop_zeros(supervised=self.supervised_weight, pseudo_label=self.pseudo_label_weight)

    @property
    def views(self) -> tuple[View, ...]:
        """Weak views of labeled and unlabeled images."""
        return (LABELED, WEAK) if self.pseudo_label_weight else (LABELED,)

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """Result of the last propagation: label and certainty omega of all unlabeled images, and class weights zeta."""
        import torch

        from crmatch.networks.network import RunningState

        if not self.pseudo_label_weight:
            return {}
        labels, certainty = torch.zeros(shape.unlabeled, dtype=torch.int64), torch.zeros(shape.unlabeled)
        return {"memory": RunningState(labels=labels, certainty=certainty, class_weights=torch.ones(shape.classes))}

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Cross-entropy of the labeled images; in the second stage, weighted cross-entropy of all images."""
        from crmatch.losses import cross_entropy
        from crmatch.networks.network import forward_together

        student = models.student
        if "weak" not in batch.views:  # no such term, or first stage
            logits = student(batch.views["labeled"]).logits
            return LossTerms({"supervised": cross_entropy(logits, batch.labels).mean()}, {"supervised": self.supervised_weight})
        outputs = forward_together(student, batch.views)
        memory = student.state("memory")
        labels, certainty = memory["labels"][batch.unlabeled], memory["certainty"][batch.unlabeled]  # y, omega (Bu,)
        rarity = memory["class_weights"]  # zeta (K,)
        supervised = rarity[batch.labels] * cross_entropy(outputs["labeled"].logits, batch.labels)  # (B,)
        pseudo_label = certainty * rarity[labels] * cross_entropy(outputs["weak"].logits, labels)  # (Bu,)
        images = len(batch.labels) + len(labels)
        terms = {"supervised": supervised.sum() / images, "pseudo_label": pseudo_label.sum() / images}
        return LossTerms(terms, self.weights, pseudo_labels=PseudoLabels(labels, certainty))

    def first_stage(self, labeled: int) -> FirstStage:
        """Passes over the labeled images in batches of labeled images only."""
        return FirstStage.of_passes(self.supervised_epochs, self.supervised_batch_size, labeled)

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Once per epoch of the second stage."""
        return steps_per_epoch if self.pseudo_label_weight else None

    def refresh(self, context: Refresh) -> None:
        """Propagate the labels over the features of all images, augmented as in training."""
        import torch

        from crmatch.methods.propagation import propagate

        labeled, unlabeled = (context.features(pool, "weak")[0] for pool in ("labeled", "unlabeled"))
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
