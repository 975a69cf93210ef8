"""What every method is: validated hyper-parameters, the views it asks for, and a loss with named terms.

Method files import torch only inside the functions that compute, so that a spec is made and checked without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from crmatch.augment.views import Batch, View
from crmatch.data.settings import Setting
from crmatch.strict_model import StrictModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape

LABELED = View("labeled", "labeled", "weak")
WEAK = View("weak", "unlabeled", "weak")
SECOND_WEAK = View("second_weak", "unlabeled", "weak")
STRONG = View("strong", "unlabeled", "strong")
ONE_UNLABELED_EACH = {"plan.unlabeled_batch_size": 64}
"""The older methods see as many unlabeled as labeled images in a step."""


def original_optimizer(weight_decay: float = 0.02) -> dict[str, Any]:
    """MixMatch's code (spec section 4): Adam, constant rate 0.002, weights shrunk by rate * decay each step."""
    return {
        "plan.optimizer": "adam",
        "plan.learning_rate": 0.002,
        "plan.decay_rule": "decoupled",
        "plan.weight_decay": weight_decay,
        "plan.schedule": [{"shape": "constant"}],
    }


def older_recipe(recipe: str, original: Mapping[str, Any]) -> dict[str, Any]:
    """The older methods' keys: `quick` has none, all others as many unlabeled as labeled images, `original` its own beside."""
    if recipe == "quick":
        return {}
    return ONE_UNLABELED_EACH | (original_optimizer() | dict(original) if recipe == "original" else {})


class Models(NamedTuple):
    """The network that is trained and its moving average."""

    student: Network
    teacher: Network


class Step(NamedTuple):
    """Where training is, and the step's own randomness.

    Attributes:
        number: from 0.
        total: length of the run in steps.
        generator: stream name -> a fresh generator for this step (e.g. `mixup`).
        ema_decay: of the weights' moving average, for averages of a method that follow as slowly.
    """

    number: int
    total: int
    generator: Callable[[str], torch.Generator]
    ema_decay: float = 0.999

    def ramp(self, steps: float) -> float:
        """A weight that rises linearly from 0 to 1 over the first `steps` steps: min(1, t / steps)."""
        return min(1.0, self.number / steps)


class PoolFeatures(Protocol):
    """What the student makes of every image of a pool."""

    def __call__(
        self, source: Literal["labeled", "unlabeled"], augmentation: Literal["none", "weak"] = "none"
    ) -> tuple[Tensor, Tensor]:
        """Features (N, D) and probabilities (N, K) of a pool's images in order, in eval mode."""


class Refresh(NamedTuple):
    """What a periodic refresh may use: the models, and all training images in order of the pools.

    Attributes:
        models: student and teacher.
        step: where training is.
        labels: int64, classes of the labeled pool.
        features: pool ("labeled" or "unlabeled") -> (features, probabilities) of every image in eval mode; the images are
            unaugmented, or weakly augmented with draws of this step.
    """

    models: Models
    step: Step
    labels: Tensor
    features: PoolFeatures


class PseudoLabels(NamedTuple):
    """What a method believed of the step's unlabeled images, for curves only.

    Attributes:
        labels: int64 (Bu,), predicted classes.
        used: (Bu,), how much each image counted in the loss, 0..1.
    """

    labels: Tensor
    used: Tensor


@dataclass(frozen=True)
class LossTerms:
    """Terms and weights of a loss; `total` is the only place where they meet.

    Attributes:
        terms: name -> scalar.
        weights: name -> factor, for the same names.
        monitors: name -> detached scalar, only for curves.
        pseudo_labels: where the method makes them.
    """

    terms: Mapping[str, Tensor]
    weights: Mapping[str, float]
    monitors: Mapping[str, Tensor] = field(default_factory=dict)
    pseudo_labels: PseudoLabels | None = None

    @cached_property
    def total(self) -> Tensor:
        """Sum over terms of weight * term."""
        parts = [self.weights[name] * term for name, term in self.terms.items()]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class Method(StrictModel, ABC):
    """A semi-supervised method: frozen hyper-parameters and a loss.

    A weight scales its term; a weight of exactly 0 also removes what only that term needs: its views, its images in the
    joint pass, its head.
    """

    name: str
    title: ClassVar[str]
    """How tables call the method."""
    summary: ClassVar[str]
    """One line for `crmatch show methods`."""
    paper: ClassVar[str]
    """Where it comes from."""
    evaluated: ClassVar[Literal["ema", "raw"]] = "ema"
    """Which model counts; the record keeps both."""
    running_statistics: ClassVar[Literal["all", "labeled", "mixed"]] = "all"
    """Which forward pass moves the running statistics of batch norms: the joint pass over all views, that over the labeled
    images alone, or that over the mixed images. Every other pass of a training step uses the statistics of its own batch
    and leaves no trace."""
    reference_steps: ClassVar[int] = 2**20
    """Length of the runs for which the method's `..._steps` are given; in a run of another length they scale with it."""

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """What the method's papers and codes fix on a data set, as dotted keys of the spec, for one of the recipes."""
        return {}

    def scaled(self, steps: int, total: int) -> int:
        """`steps` of a run of the reference length, in a run of `total` steps: in proportion, at least one.

        The one rule by which every ramp, warm-up and interval follows the length of a run (spec section 6.1).
        """
        return max(1, round(steps * total / self.reference_steps))

    @property
    @abstractmethod
    def views(self) -> tuple[View, ...]:
        """The views the loss needs, in the order of the joint pass."""

    @property
    def extra_batch_size(self) -> int:
        """Images per step of the `extra` source; 0 where no view asks for it."""
        return 0

    def extra_images(self, labeled: int, unlabeled: int) -> int:
        """Images in the joint forward pass that are not views, e.g. rotated copies, for batches of these sizes."""
        return 0

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """Modules trained beside backbone and classifier, and running state as their buffers."""
        return {}

    @abstractmethod
    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms of one step."""

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Steps between two calls of `refresh`, the first before step `refresh_start`; None: never.

        Args:
            steps_per_epoch: steps in one pass over the unlabeled images.
            total_steps: length of the run.
        """
        return None

    def refresh_start(self, total_steps: int) -> int:
        """The step before which `refresh` is called for the first time, in a run of `total_steps`."""
        return 0

    def refresh(self, context: Refresh) -> None:
        """Renew what is remembered of the whole training set."""
