"""ReMixMatch (Berthelot et al., ICLR 2020): MixMatch with aligned guesses, strong views that follow weak ones, and rotation."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.methods.base import ONE_UNLABELED_EACH, STRONG, WEAK, LossTerms, Method, Models, Step, original_optimizer
from crmatch.methods.mixmatch import MixedPass, predict_mixed
from crmatch.methods.mixup import draw_mixing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape

STRONG_LABELED = View("labeled", "labeled", "strong")
FEW_LABELS = 4
"""Labels per class up to which the paper uses one strong view and more rotation."""


class ReMixMatch(Method):
    """L = CE(mixed labeled) + w(t) (a CE(mixed unlabeled) + b CE(q, first strong view)) + lambda_r CE(rotation).

    q = sharpen(normalize(p_weak * p_data / p_model)), the same for all views of an image; p_model is the mean of the last
    batches' mean predictions, p_data follows the labels. MixUp as in MixMatch, over labeled, weak and strong views.
    Labeled images are strongly augmented as well.
    """

    title: ClassVar = "ReMixMatch"
    summary: ClassVar = "MixMatch with aligned guesses, strong views that follow the weak one, and rotation prediction"
    paper: ClassVar = "Berthelot et al., ICLR 2020, arXiv 1911.09785"
    running_statistics: ClassVar = "mixed"

    name: str = "remixmatch"
    strong_views: int = Field(8, ge=1, le=32)
    """K, strong views of each unlabeled image."""
    temperature: float = Field(0.5, gt=0)
    mixup_alpha: float = Field(0.75, gt=0)
    mixed_weight: float = Field(1.5, ge=0)
    strong_weight: float = Field(0.5, ge=0)
    """Of the first strong view, unmixed, against q."""
    rotation_weight: float = Field(0.5, ge=0)
    ramp_steps: int = Field(16_384, ge=1)
    """Steps over which the two unlabeled weights rise, in a run of 2^20."""
    memory_batches: int = Field(128, ge=1)
    """Batches whose mean predictions make p_model."""
    average_decay: float = Field(0.999, ge=0, lt=1)
    """How slowly p_data follows the labels."""
    weak_augmentation: Literal["weak", "none"] = "weak"
    """Whether the view that is guessed from is moved and mirrored; on STL-10 it is not."""
    mixed_pass: MixedPass = "joint"
    """One pass over all mixed images, or one for each group of them, of which the first moves the running statistics."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """CTAugment without CutOut; strong views and rotation by data set and number of labels."""
        if recipe == "usb":
            return ONE_UNLABELED_EACH | {"method.strong_views": 2}
        keys: dict[str, Any] = {"augmentation.policy": "ctaugment", "augmentation.cutout": False}
        if 0 < setting.labels_per_class <= FEW_LABELS and setting.stem != "cifar100":
            more_rotation = (
                {"method.rotation_weight": 3}
                if setting.stem == "svhn"
                else {
                    "method.rotation_weight": 2,
                    "method.ramp_steps": 131_072,
                }
            )
            keys |= {"method.strong_views": 1} | more_rotation
        elif setting.stem == "stl10":
            keys["method.strong_views"] = 4
        if setting.stem == "stl10":
            keys["method.weak_augmentation"] = "none"
        if recipe == "quick":
            # At most two strong views (USB's number): eight would make a step four times as long as CR-Match's.
            # What alignment remembers is shortened as the moving average of the weights is in `quick`, by ten or by two.
            digits = setting.data == "digits"
            return keys | {
                "method.strong_views": min(2, keys.get("method.strong_views", 2)),
                "method.memory_batches": 13 if digits else 64,
                "method.average_decay": 0.99 if digits else 0.998,
            }
        keys |= ONE_UNLABELED_EACH
        return keys | original_optimizer() | {"method.mixed_pass": "interleaved"} if recipe == "original" else keys

    @property
    def weights(self) -> dict[str, float]:
        """Final factor of each term, those of exactly 0 left out."""
        weights = {"mixed": self.mixed_weight, "strong": self.strong_weight, "rotation": self.rotation_weight}
        return {"supervised": 1.0} | {name: weight for name, weight in weights.items() if weight}

    @property
    def views(self) -> tuple[View, ...]:
        """Labeled images, strongly augmented; one weak and K strong views of the unlabeled ones."""
        weak = WEAK._replace(augmentation=self.weak_augmentation)
        strong = tuple(STRONG._replace(name=f"strong_{number}") for number in range(2, self.strong_views + 1))
        if "mixed" in self.weights:
            return (STRONG_LABELED, weak, STRONG, *strong)
        return (STRONG_LABELED, *(weak,) * ("strong" in self.weights), *(STRONG,) * (len(self.weights) > 1))

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """The linear rotation head, and what alignment remembers."""
        import torch

        from crmatch.networks.network import ROTATIONS, RunningState, linear_head

        heads: dict[str, nn.Module] = {}
        if "rotation" in self.weights:
            heads["rotation"] = linear_head(shape.features, ROTATIONS)
        if "mixed" in self.weights or "strong" in self.weights:
            memory = torch.full((self.memory_batches, shape.classes), 1 / shape.classes)
            heads["alignment"] = RunningState(model=memory, position=torch.tensor(0), data=memory[0].clone())
        return heads

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Guess in one pass, predict the mixtures in another, the unmixed strong and the rotated images in a third."""
        import torch

        from crmatch.losses import cross_entropy

        student, views = models.student, dict(batch.views)
        targets = torch.nn.functional.one_hot(batch.labels, student.classifier.out_features).to(views["labeled"].dtype)
        guess = self._guess(student, views["weak"], targets) if "weak" in views else targets[:0]
        mixed = views if "mixed" in self.weights else {"labeled": views["labeled"]}
        images = torch.cat(list(mixed.values()))
        targets = torch.cat([targets, *[guess] * (len(mixed) - 1)])
        mixing = draw_mixing(len(images), self.mixup_alpha, step.generator("mixup"), images.device)
        logits = predict_mixed(student, mixing.apply(images), len(mixed), self.mixed_pass)
        errors, labeled = cross_entropy(logits, mixing.apply(targets)), len(batch.labels)
        terms = {"supervised": errors[:labeled].mean()}
        if "mixed" in self.weights:
            terms["mixed"] = errors[labeled:].mean()
        if "strong" in views:
            terms |= self._unmixed_terms(student, views["strong"], guess)
        rise = step.ramp(self.scaled(self.ramp_steps, step.total))
        weights = {name: weight * (rise if name in ("mixed", "strong") else 1) for name, weight in self.weights.items()}
        return LossTerms({name: terms[name] for name in weights}, weights)

    def _guess(self, student: Network, weak: Tensor, onehot: Tensor) -> Tensor:
        """q, without gradient: (Bu, K). Alignment is used as the steps before left it, then takes in this step."""
        import torch

        from crmatch.losses import align, sharpen
        from crmatch.networks.batch_norm import forward_without_bn_update

        state = student.state("alignment")
        with torch.no_grad():
            probabilities = forward_without_bn_update(student, weak).logits.softmax(dim=1)
            guess = sharpen(align(probabilities, state["data"], state["model"].mean(dim=0)), self.temperature)
            state["model"].index_copy_(0, state["position"][None], probabilities.mean(dim=0, keepdim=True))
            state["position"].add_(1).remainder_(self.memory_batches)
            state["data"].lerp_(onehot.mean(dim=0), 1 - self.average_decay)
        return guess

    def _unmixed_terms(self, student: Network, strong: Tensor, guess: Tensor) -> dict[str, Tensor]:
        """The first strong view against q, and its rotation: a quarter of the batch for each angle, counter-clockwise."""
        import torch

        from crmatch.losses import cross_entropy
        from crmatch.networks.batch_norm import forward_without_bn_update
        from crmatch.networks.network import ROTATIONS

        parts = {"strong": strong} if "strong" in self.weights else {}
        turns = torch.arange(len(strong), device=strong.device) * ROTATIONS // len(strong)
        if "rotation" in self.weights:
            ends = [-(-angle * len(strong) // ROTATIONS) for angle in range(ROTATIONS + 1)]
            quarters = [strong[start:end] for start, end in pairwise(ends)]
            parts["rotation"] = torch.cat([quarter.rot90(angle, (2, 3)) for angle, quarter in enumerate(quarters)])
        if not parts:
            return {}
        outputs = forward_without_bn_update(student, torch.cat(list(parts.values())))
        terms = {}
        if "strong" in parts:
            terms["strong"] = cross_entropy(outputs.logits[: len(strong)], guess).mean()
        if "rotation" in parts:
            logits = student.head("rotation", outputs.features[-len(strong) :])
            terms["rotation"] = cross_entropy(logits, turns).mean()
        return terms
