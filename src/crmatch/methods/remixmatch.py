"""ReMixMatch (Berthelot et al., ICLR 2020): MixMatch with distribution alignment, strong views, and rotation prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods import base
from crmatch.methods.base import STRONG, WEAK, LossTerms, Method, Models, PseudoLabels, Refresh, Step, drop_zeros, spec_keys
from crmatch.methods.confidence import follow_predictions, initial_average
from crmatch.methods.mixmatch import MixedPass
from crmatch.methods.mixup import draw_mixing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape


class ReMixMatch(Method):
    """L = CE(mixed labeled) + w(t) (a CE(mixed unlabeled) + b CE(q, first strong view)) + lambda_r CE(rotation).

    q = sharpen(Normalize(p_weak * p_data / p_model)) is the target of all views of an image. p_model is the mean prediction on
    the last batches, or a running average of it; p_data are the class shares of the labels. MixUp as in MixMatch, over labeled,
    weak and strong views.
    """

    title: ClassVar = "ReMixMatch"
    summary: ClassVar = "MixMatch with aligned guesses, strong views that follow the weak one, and rotation prediction"
    paper: ClassVar = "Berthelot et al., ICLR 2020, arXiv 1911.09785"
    running_statistics: ClassVar = "mixed"

    name: str = "remixmatch"
    strong_views: int = Field(8, ge=1, le=32)
    """Strong views of each unlabeled image, called K in the paper."""
    temperature: float = Field(0.5, gt=0)
    mixup_alpha: float = Field(0.75, gt=0)
    share_per: Literal["sample", "batch"] = "sample"
    """Draw lam for each image (google-research/remixmatch), or once per step (USB)."""
    mixed_weight: float = Field(1.5, ge=0)
    """a: weight of the mixed unlabeled images."""
    strong_weight: float = Field(0.5, ge=0)
    """b: weight of the first strong view, which is not mixed."""
    rotation_weight: float = Field(0.5, ge=0)
    ramp_steps: int = Field(16_384, ge=1)
    """w(t) rises linearly from 0 to 1 over so many steps of a run of 2^20 (`Method.ramp`)."""
    alignment: Literal["memory", "average"] = "memory"
    """`memory` (google-research/remixmatch): p_model is the mean over the last batches, p_data a running average of the labels
    seen, both before this step. `average` (USB): p_model is a running average that includes this step, p_data is exact."""
    memory_batches: int = Field(128, ge=1)
    """p_model is the mean over so many batches (alignment memory)."""
    average_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the running average: p_data (alignment memory) or p_model (alignment average)."""
    labeled_augmentation: Literal["strong", "weak"] = "strong"
    """Augmentation of the labeled images; weak in USB."""
    weak_augmentation: Literal["weak", "none"] = "weak"
    """Augmentation of the view whose label is guessed; none on STL-10."""
    mixed_pass: MixedPass = "joint"
    """One forward pass over all mixed images, or one for each view, of which the first updates the running statistics."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """google-research/remixmatch: CTAugment without CutOut; views and weights by data set and number of labels."""
        if recipe == "usb":
            usb = spec_keys("method", share_per="batch", alignment="average", labeled_augmentation="weak")
            return base.equal_batches(recipe) | usb | spec_keys("method", strong_views=2)
        keys = spec_keys("augmentation", policy="ctaugment", cutout=False)
        if setting.stem == "stl10":
            keys |= spec_keys("method", strong_views=4, weak_augmentation="none")
        # With at most 4 labels per class: one strong view, and more weight on rotation
        if 0 < setting.labels_per_class <= 4 and setting.stem != "cifar100":
            few = dict(rotation_weight=3) if setting.stem == "svhn" else dict(rotation_weight=2, ramp_steps=131_072)
            keys |= spec_keys("method", strong_views=1, **few)
        if recipe == "quick":
            # At most two strong views (USB's number): with eight, a step is four times as long as a step of CR-Match.
            # The memory of alignment is shortened like that of the EMA of the weights, 1 / (1 - decay) steps instead of 1,000.
            batches = round(128 / 1000 / (1 - base.QUICK_EMA_DECAY))
            views = min(2, keys.get("method.strong_views", 2))
            quick = spec_keys("method", strong_views=views, memory_batches=batches, average_decay=base.QUICK_EMA_DECAY)
            return keys | base.equal_batches(recipe) | quick
        original = base.original_optimizer() | spec_keys("method", mixed_pass="interleaved")
        return keys | base.equal_batches(recipe) | (original if recipe == "original" else {})

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each term after the ramp; terms with weight 0 are left out."""
        return drop_zeros(supervised=1.0, mixed=self.mixed_weight, strong=self.strong_weight, rotation=self.rotation_weight)

    @property
    def views(self) -> tuple[View, ...]:
        """One view of labeled images; one weak and `strong_views` strong views of unlabeled images."""
        labeled = View("labeled", "labeled", self.labeled_augmentation)
        weak = WEAK._replace(augmentation=self.weak_augmentation)
        strong = tuple(STRONG._replace(name=f"strong_{number}") for number in range(2, self.strong_views + 1))
        if "mixed" in self.weights:
            return (labeled, weak, STRONG, *strong)
        return (labeled, *(weak,) * ("strong" in self.weights), *(STRONG,) * (len(self.weights) > 1))

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """A linear rotation head, and the running state of distribution alignment."""
        import torch

        from crmatch.networks.network import ROTATIONS, RunningState

        heads: dict[str, nn.Module] = {}
        if "rotation" in self.weights:
            heads["rotation"] = torch.nn.Linear(shape.features, ROTATIONS)
        if "mixed" in self.weights or "strong" in self.weights:
            memory = torch.full((self.memory_batches, shape.classes), 1 / shape.classes)
            state = {"model": memory, "position": torch.tensor(0)}
            state = state if self.alignment == "memory" else initial_average(shape.classes)
            heads["alignment"] = RunningState(**state, data=memory[0].clone())
        return heads

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms, from forward passes over the weak view, over the mixed images, and over unmixed and rotated images."""
        import torch

        from crmatch.losses import cross_entropy
        from crmatch.networks.batch_norm import forward_interleaved, forward_without_bn_update
        from crmatch.networks.network import ROTATIONS

        student, views, weights = models.student, batch.views, self.weights
        onehot = torch.nn.functional.one_hot(batch.labels, student.classifier.out_features).to(views["labeled"].dtype)
        guess = self._guess(student, views["weak"], onehot) if "weak" in views else onehot[:0]  # q (Bu, K)

        # MixUp of all views; only of the labeled images if the mixed term has no weight
        mixed = views if "mixed" in weights else {"labeled": views["labeled"]}
        images, targets = torch.cat(list(mixed.values())), torch.cat([onehot, *[guess] * (len(mixed) - 1)])
        mixing = draw_mixing(images, self.mixup_alpha, step.generator("mixup"), per=self.share_per)
        logits = forward_interleaved(student, mixing.apply(images), len(mixed) if self.mixed_pass == "interleaved" else 1)
        errors, labeled = cross_entropy(logits, mixing.apply(targets)), len(batch.labels)
        terms = {"supervised": errors[:labeled].mean()}
        if "mixed" in weights:
            terms["mixed"] = errors[labeled:].mean()

        # First strong view (Bu, C, H, W) as it is, and rotated counter-clockwise: a quarter of the batch by each angle
        further = {"strong": views["strong"]} if "strong" in weights else {}
        if "rotation" in weights:
            count = len(views["strong"])
            turns = torch.arange(count, device=images.device) * ROTATIONS // count  # 0 .. 0 1 .. 1 2 .. 2 3 .. 3
            sizes = [sum(row * ROTATIONS // count == angle for row in range(count)) for angle in range(ROTATIONS)]
            quarters = torch.split(views["strong"], sizes)
            further["rotation"] = torch.cat([quarter.rot90(angle, (2, 3)) for angle, quarter in enumerate(quarters)])
        if further:
            outputs = forward_without_bn_update(student, torch.cat(list(further.values())))
        if "strong" in weights:
            terms["strong"] = cross_entropy(outputs.logits[: len(guess)], guess).mean()
        if "rotation" in weights:
            terms["rotation"] = cross_entropy(student.head("rotation", outputs.features[-count:]), turns).mean()

        ramp = self.ramp(self.ramp_steps, step)
        ramped = {name: weights[name] * (ramp if name in ("mixed", "strong") else 1) for name in terms}
        return LossTerms(terms, ramped, pseudo_labels=PseudoLabels.all_used(guess) if len(guess) else None)

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Once, at the start, if p_data is exact."""
        return total_steps if self.alignment == "average" else None

    def refresh(self, context: Refresh) -> None:
        """Set p_data to the class shares of all labels."""
        from crmatch.losses import class_shares

        data = context.models.student.state("alignment")["data"]
        data.copy_(class_shares(context.labels, len(data), data.dtype))

    def _guess(self, student: Network, weak: Tensor, onehot: Tensor) -> Tensor:
        """Guessed labels q (Bu, K), without gradient; updates the state of the alignment."""
        import torch

        from crmatch.losses import align, sharpen
        from crmatch.networks.batch_norm import forward_without_bn_update

        state = student.state("alignment")
        with torch.no_grad():
            probabilities = forward_without_bn_update(student, weak).logits.softmax(dim=1)
            if self.alignment == "average":
                model = follow_predictions(state, probabilities, self.average_decay)
                return sharpen(align(probabilities, state["data"], model), self.temperature)
            guess = sharpen(align(probabilities, state["data"], state["model"].mean(dim=0)), self.temperature)
            state["model"].index_copy_(0, state["position"][None], probabilities.mean(dim=0, keepdim=True))
            state["position"].add_(1).remainder_(self.memory_batches)
            state["data"].lerp_(onehot.mean(dim=0), 1 - self.average_decay)
        return guess
