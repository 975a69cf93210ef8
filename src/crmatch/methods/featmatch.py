"""FeatMatch (Kuo et al., ECCV 2020): consistency between views whose features are refined by attention to prototypes.

Prototypes of all classes are recomputed every few hundred steps from the features of labeled images and of confidently
predicted unlabeled images (prototypes.py). One classifier is applied to features x and to refined features x_g. Predictions
come from x_g, also those of the finished model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import LABELED, WEAK, LossTerms, Method, Models, PseudoLabels, Refresh, Step, spec_keys
from crmatch.methods.mixup import draw_mixing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape

STEPS = 183_000
# (steps, first and last factor of the learning rate) of the four phases of a run
PHASES = ((3_000, 0.01, 0.1), (75_000, 0.1, 1.0), (75_000, 1.0, 0.1), (30_000, 0.1, 1e-4))


class FeatMatch(Method):
    """L = CE_l(x_g) + c(t) (0.5 CE_u(x_g) + 2 CE_u(x)) on mixed views, c(t) = min(1, t / 75,000).

    During the warm-up there is no attention: L = CE_l(x) + 0.5 c(t) CE_u(x).
    """

    title: ClassVar = "FeatMatch"
    summary: ClassVar = "many strong views per image, features refined by attention to prototypes, MixUp"
    paper: ClassVar = "Kuo et al., ECCV 2020, arXiv 2007.08505"
    evaluated: ClassVar = "raw"
    running_statistics: ClassVar = "mixed"
    reference_steps: ClassVar = STEPS

    name: str = "featmatch"
    strong_views: int = Field(8, ge=1, le=32)
    """Strong views of each image, without crop and mirroring, in addition to a weak one; called K in the paper."""
    temperature: float = Field(0.75, gt=0)
    """T: guessed labels are sharpened to p^(1/T), normalized."""
    mixup_alpha: float = Field(0.75, gt=0)
    prototypes: int = Field(20, ge=2)
    """Prototypes per class, half of them from labeled images."""
    prototype_confidence: float = Field(0.5, gt=0, lt=1)
    """Confidence above which unlabeled features are used for prototypes; halved until every class has enough."""
    attention_heads: int = Field(4, ge=1)
    attention_dropout: float = Field(0.1, ge=0, lt=1)
    warmup_steps: int = Field(3_000, ge=1)
    """Steps without attention. This and the next two fields are for a run of 183,000 steps."""
    refresh_steps: int = Field(500, ge=1)
    """Steps between two computations of prototypes."""
    ramp_steps: int = Field(75_000, ge=1)
    """Steps until c(t) is 1 (`Method.ramp`)."""
    supervised_weight: float = Field(1.0, gt=0)
    consistency_weight: float = Field(0.5, ge=0)
    """Weight of CE_u(x_g), during the warm-up of CE_u(x)."""
    plain_consistency_weight: float = Field(2.0, ge=0)
    """Weight of CE_u(x) after the warm-up."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """GT-RIPL/FeatMatch: learning rate in four phases, decay of all parameters, no CutOut, its RandAugment."""
        if recipe == "quick":
            # Two strong views instead of eight: with eight, a step has five times as many images as a step of any other method.
            return spec_keys("method", strong_views=2)
        if recipe not in ("paper", "original"):
            return {}
        schedule = [{"share": length / STEPS, "shape": "linear", "start": start, "end": end} for length, start, end in PHASES]
        keys = (
            spec_keys("plan", steps=STEPS, labeled_batch_size=64, unlabeled_batch_size=128, evaluate_every=250)
            | spec_keys("plan", learning_rate=0.04, momentum=0.95, schedule=schedule)
            | spec_keys("plan", weight_decay=2e-4, decay_parameters="all")
            | spec_keys("augmentation", variant="featmatch", cutout=False)
            | spec_keys("augmentation", padding=setting.image_size // 16, padding_mode="zero")
            | {"data.unlabeled": "remaining"}
        )
        wide_resnet = setting.defaults.network != "resnet-18"
        return keys | (spec_keys("network", slope=0.0, block="usb") if wide_resnet else {})

    @property
    def uses_unlabeled(self) -> bool:
        """Whether a term needs unlabeled images."""
        return bool(self.consistency_weight or self.plain_consistency_weight)

    @property
    def views(self) -> tuple[View, ...]:
        """A weak view and `strong_views` strong views of labeled images, then of unlabeled images."""
        numbers = range(1, self.strong_views + 1)
        labeled = (LABELED, *(View(f"labeled_strong_{number}", "labeled", "strong_only") for number in numbers))
        unlabeled = (WEAK, *(View(f"strong_{number}", "unlabeled", "strong_only") for number in numbers))
        return labeled + unlabeled if self.uses_unlabeled else labeled

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """The attention (part of the finished model), and features of the unlabeled images seen since the last refresh."""
        import torch

        from crmatch.networks.attention import AttentionRefiner
        from crmatch.networks.network import RunningState

        prototypes = shape.classes * self.prototypes
        refiner = AttentionRefiner(shape.features, prototypes, self.attention_heads, self.attention_dropout)
        if not self.uses_unlabeled:
            return {"refiner": refiner}
        features, confidence = torch.zeros(shape.unlabeled, shape.features), torch.zeros(shape.unlabeled)
        classes = torch.zeros(shape.unlabeled, dtype=torch.int64)
        return {"refiner": refiner, "memory": RunningState(features=features, classes=classes, confidence=confidence)}

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms, from one forward pass that guesses labels and one over the mixed views of all images."""
        import torch

        from crmatch.losses import cross_entropy, sharpen
        from crmatch.networks.batch_norm import forward_without_bn_update

        student, attends = models.student, step.number >= self.refresh_start(step)
        views_per_image, pseudo_labels = 1 + self.strong_views, None
        images = torch.cat([batch.views[view.name] for view in self.views])  # labeled views, then unlabeled views
        targets = torch.nn.functional.one_hot(batch.labels, student.classifier.out_features).to(images.dtype)
        targets = targets.repeat(views_per_image, 1)
        labeled = len(targets)

        # Guessed label (Bu, K) of each unlabeled image, for all its views. Paper: all views go through this pass. Here: only
        # the weak views, because the others are not used; and the pass does not update the running statistics.
        if self.uses_unlabeled:
            with torch.no_grad():
                weak = torch.cat([batch.views["labeled"], batch.views["weak"]])
                outputs = forward_without_bn_update(student, weak)
                logits = _refined_logits(student, outputs.features) if attends else outputs.logits
            guess = logits[len(batch.labels) :].softmax(dim=1)
            if attends:  # keep features x for the next prototypes
                memory = student.state("memory")
                memory["features"][batch.unlabeled] = outputs.features[len(batch.labels) :]
                memory["confidence"][batch.unlabeled], memory["classes"][batch.unlabeled] = guess.max(dim=1)
            targets = torch.cat([targets, sharpen(guess, self.temperature).repeat(views_per_image, 1)])
            pseudo_labels = PseudoLabels.all_used(guess)

        # MixUp of all views with one share per step; soft-label cross-entropy on x_g ("predicted") and on x ("plain")
        mixing = draw_mixing(images, self.mixup_alpha, step.generator("mixup"), per="batch")
        outputs, targets = student(mixing.apply(images)), mixing.apply(targets)
        plain = outputs.logits
        predicted = _refined_logits(student, outputs.features) if attends else plain
        terms = {"supervised": cross_entropy(predicted[:labeled], targets[:labeled]).mean()}
        if self.consistency_weight:
            terms["consistency"] = cross_entropy(predicted[labeled:], targets[labeled:]).mean()
        if self.plain_consistency_weight and attends:
            terms["plain_consistency"] = cross_entropy(plain[labeled:], targets[labeled:]).mean()

        ramp = self.ramp(self.ramp_steps, step)  # c(t)
        weights = {"supervised": self.supervised_weight, "consistency": ramp * self.consistency_weight}
        weights["plain_consistency"] = ramp * self.plain_consistency_weight
        return LossTerms(terms, {name: weights[name] for name in terms}, pseudo_labels=pseudo_labels)

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Every 500 of 183,000 steps."""
        return self.scaled(self.refresh_steps, total_steps)

    def refresh_start(self, step: Step) -> int:
        """The first step after the warm-up, from which on features attend to prototypes."""
        return self.scaled(self.warmup_steps, step.total)

    def refresh(self, context: Refresh) -> None:
        """Compute new prototypes from labeled features and from unlabeled features seen since the last refresh."""
        from crmatch.methods.prototypes import Candidates, confident_candidates, find_prototypes
        from crmatch.networks.attention import AttentionRefiner

        student = context.models.student
        classes, unlabeled = student.classifier.out_features, None
        labeled = Candidates(context.features("labeled")[0].cpu(), context.labels.cpu())
        if self.uses_unlabeled:
            memory = student.state("memory")
            seen = Candidates(memory["features"].cpu(), memory["classes"].cpu())
            confidence = memory["confidence"].cpu()
            unlabeled = confident_candidates(seen, confidence, classes, self.prototype_confidence, self.prototypes)
            memory["confidence"].zero_()  # marks all stored features as not seen
        refiner = student.heads["refiner"]
        assert isinstance(refiner, AttentionRefiner)
        generator = context.step.generator("prototypes")
        refiner.remember(*find_prototypes(labeled, unlabeled, classes, self.prototypes, generator))


def _refined_logits(student: Network, features: Tensor) -> Tensor:
    """g(x_g) of features x, with the same classifier g as g(x)."""
    logits: Tensor = student.classifier(student.head("refiner", features))
    return logits
