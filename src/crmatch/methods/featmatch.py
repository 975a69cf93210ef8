"""FeatMatch (Kuo et al., ECCV 2020): consistency between views whose features attend to prototypes of all classes.

Prototypes are found anew every few hundred steps among the features of labeled images and of unlabeled images that were
predicted with confidence since. The classifier is applied to features x and to refined features x_g alike; predictions,
also those of the finished model, come from x_g.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, WEAK, LossTerms, Method, Models, PseudoLabels, Refresh, Step
from crmatch.methods.mixup import draw_mixing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape

STEPS = 183_000
PHASES = ((3_000, 0.01, 0.1), (75_000, 0.1, 1.0), (75_000, 1.0, 0.1), (30_000, 0.1, 1e-4))
"""Length in steps, first and last factor of the learning rate."""


class FeatMatch(Method):
    """L = CE_l(x_g) + c(t) (0.5 CE_u(x_g) + 2 CE_u(x)) on mixed views, c(t) = min(1, t / 75,000).

    In the warm-up there is no attention: L = CE_l(x) + 0.5 c(t) CE_u(x).
    """

    title: ClassVar = "FeatMatch"
    summary: ClassVar = "many strong views per image, features refined by attention to prototypes, MixUp"
    paper: ClassVar = "Kuo et al., ECCV 2020, arXiv 2007.08505"
    evaluated: ClassVar = "raw"
    running_statistics: ClassVar = "mixed"
    reference_steps: ClassVar = STEPS

    name: str = "featmatch"
    strong_views: int = Field(8, ge=1, le=32)
    """K: strong views of each image, beside a weak one."""
    temperature: float = Field(0.75, gt=0)
    """T: guessed labels are p^(1/T), normalized."""
    mixup_alpha: float = Field(0.75, gt=0)
    prototypes: int = Field(20, ge=2)
    """Per class, half of them from labeled features."""
    prototype_confidence: float = Field(0.5, gt=0, lt=1)
    """Unlabeled features count above it; it is halved until every class has more features than prototypes."""
    attention_heads: int = Field(4, ge=1)
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    warmup_steps: int = Field(3_000, ge=1)
    """Without attention; of 183,000 steps, as the two lengths below."""
    refresh_steps: int = Field(500, ge=1)
    ramp_steps: int = Field(75_000, ge=1)
    """Until c(t) is 1."""
    supervised_weight: float = Field(1.0, gt=0)
    consistency_weight: float = Field(0.5, ge=0)
    """Of CE_u on the branch that predicts: x_g, in the warm-up x."""
    plain_consistency_weight: float = Field(2.0, ge=0)
    """Of CE_u on x after the warm-up."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """Rates in four phases, batches of 64 and 128, decay of all parameters, no CutOut (spec 4.8)."""
        if recipe == "quick":
            # Two strong views instead of eight: with eight a step has five times as many images as any other method's.
            return {"method.strong_views": 2}
        if recipe not in ("paper", "original"):
            return {}
        schedule = [{"share": length / STEPS, "shape": "linear", "start": start, "end": end} for length, start, end in PHASES]
        keys: dict[str, Any] = {
            "data.unlabeled": "remaining",
            "augmentation.variant": "featmatch",
            "augmentation.cutout": False,
            "augmentation.padding": setting.image_size // 16,
            "augmentation.padding_mode": "zero",
            "plan.steps": STEPS,
            "plan.labeled_batch_size": 64,
            "plan.unlabeled_batch_size": 128,
            "plan.learning_rate": 0.04,
            "plan.momentum": 0.95,
            "plan.weight_decay": 2e-4,
            "plan.decay_parameters": "all",
            "plan.schedule": schedule,
            "plan.evaluate_every": 250,
        }
        if setting.defaults.network != "resnet-18":
            keys |= {"network.slope": 0.0, "network.block": "usb"}
        return keys

    @property
    def uses_unlabeled(self) -> bool:
        """Whether any term needs unlabeled images."""
        return bool(self.consistency_weight or self.plain_consistency_weight)

    @property
    def views(self) -> tuple[View, ...]:
        """A weak view and K strong views of labeled images, then of unlabeled ones."""
        numbers = range(1, self.strong_views + 1)
        labeled = (LABELED, *(View(f"labeled_strong_{number}", "labeled", "strong") for number in numbers))
        unlabeled = (WEAK, *(View(f"strong_{number}", "unlabeled", "strong") for number in numbers))
        return labeled + unlabeled if self.uses_unlabeled else labeled

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """AttFeat, which is part of the finished model, and the unlabeled features seen since the last refresh."""
        import torch

        from crmatch.networks.attention import AttentionRefiner
        from crmatch.networks.network import RunningState

        places = shape.classes * self.prototypes
        memory = RunningState(
            features=torch.zeros(shape.unlabeled, shape.features),
            classes=torch.zeros(shape.unlabeled, dtype=torch.int64),
            confidence=torch.zeros(shape.unlabeled),
        )
        refiner = AttentionRefiner(shape.features, places, self.attention_heads, self.attention_dropout)
        return {"refiner": refiner} | ({"memory": memory} if self.uses_unlabeled else {})

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms from one pass over all mixed views; guessed labels come from a pass before it."""
        import torch
        import torch.nn.functional as F  # noqa: N812

        from crmatch.losses import sharpen

        student, attends = models.student, step.number >= self.refresh_start(step.total)
        groups = {source: [view.name for view in self.views if view.source == source] for source in ("labeled", "unlabeled")}
        images = torch.cat([batch.views[name] for names in groups.values() for name in names])
        classes = student.classifier.out_features
        targets = F.one_hot(batch.labels, classes).to(images.dtype).repeat(len(groups["labeled"]), 1)
        labeled, pseudo_labels = len(targets), None
        if self.uses_unlabeled:
            guessed = self._guess(batch, student, attends)
            targets = torch.cat([targets, sharpen(guessed, self.temperature).repeat(len(groups["unlabeled"]), 1)])
            pseudo_labels = PseudoLabels(guessed.argmax(dim=1), torch.ones_like(guessed[:, 0]))
        mixing = draw_mixing(len(images), self.mixup_alpha, step.generator("mixup"), images.device, per="batch")
        outputs, targets = student(mixing.apply(images)), mixing.apply(targets)
        predicted = _refined_logits(student, outputs.features) if attends else outputs.logits
        terms, weights = self._terms(predicted, outputs.logits, targets, labeled, attends), self._weights(step)
        return LossTerms(terms, {name: weights[name] for name in terms}, pseudo_labels=pseudo_labels)

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Every 500 of 183,000 steps."""
        return self.scaled(self.refresh_steps, total_steps)

    def refresh_start(self, total_steps: int) -> int:
        """The first step after the warm-up; from there on features attend to prototypes."""
        return self.scaled(self.warmup_steps, total_steps)

    def refresh(self, context: Refresh) -> None:
        """Find prototypes among labeled features and the confident unlabeled ones since the last refresh; forget those."""
        from crmatch.methods.prototypes import Candidates, confident_candidates, find_prototypes
        from crmatch.networks.attention import AttentionRefiner

        student = context.models.student
        classes = student.classifier.out_features
        labeled = Candidates(context.features("labeled")[0].cpu(), context.labels.cpu())
        unlabeled = None
        if self.uses_unlabeled:
            memory = student.state("memory")
            seen = Candidates(memory["features"].cpu(), memory["classes"].cpu())
            confidence = memory["confidence"].cpu()
            unlabeled = confident_candidates(seen, confidence, classes, self.prototype_confidence, self.prototypes)
            memory["confidence"].zero_()
        generator = context.step.generator("prototypes")
        refiner = student.heads["refiner"]
        assert isinstance(refiner, AttentionRefiner)
        refiner.remember(*find_prototypes(labeled, unlabeled, classes, self.prototypes, generator))

    def _guess(self, batch: Batch, student: Network, attends: bool) -> Tensor:
        """Class probabilities (Bu, K) of the unlabeled weak views; their features x are remembered once there is attention.

        Paper: all views go through this pass. Here: the weak ones only, because nothing else of it is used but batch
        statistics; and only the mixed pass moves running statistics.
        """
        import torch

        from crmatch.networks.batch_norm import forward_without_bn_update

        with torch.no_grad():
            outputs = forward_without_bn_update(student, torch.cat([batch.views["labeled"], batch.views["weak"]]))
            logits = _refined_logits(student, outputs.features) if attends else outputs.logits
        probabilities = logits[len(batch.labels) :].softmax(dim=1)
        if attends:
            memory = student.state("memory")
            memory["features"][batch.unlabeled] = outputs.features[len(batch.labels) :]
            memory["confidence"][batch.unlabeled], memory["classes"][batch.unlabeled] = probabilities.max(dim=1)
        return probabilities

    def _weights(self, step: Step) -> dict[str, float]:
        """Factor of each term; c(t) rises over `ramp_steps`."""
        ramp = step.ramp(self.scaled(self.ramp_steps, step.total))
        return {
            "supervised": self.supervised_weight,
            "consistency": ramp * self.consistency_weight,
            "plain_consistency": ramp * self.plain_consistency_weight,
        }

    def _terms(self, predicted: Tensor, plain: Tensor, targets: Tensor, labeled: int, attends: bool) -> dict[str, Tensor]:
        """Soft-label cross-entropy of the first `labeled` images, and of the others on both branches."""
        from crmatch.losses import cross_entropy

        terms = {"supervised": cross_entropy(predicted[:labeled], targets[:labeled]).mean()}
        if self.consistency_weight:
            terms["consistency"] = cross_entropy(predicted[labeled:], targets[labeled:]).mean()
        if self.plain_consistency_weight and attends:
            terms["plain_consistency"] = cross_entropy(plain[labeled:], targets[labeled:]).mean()
        return terms


def _refined_logits(student: Network, features: Tensor) -> Tensor:
    """g(x_g), with the classifier that g(x) has."""
    logits: Tensor = student.classifier(student.head("refiner", features))
    return logits
