"""The interface of a method: validated hyper-parameters, the views it asks for, and a loss with named terms.

Method files import torch only inside the functions that compute, so that a spec can be made and checked without it.
Shapes in comments: B labeled and Bu unlabeled images per step, K classes, D features, (C, H, W) an image.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict

from crmatch.augment.views import NO_FIRST_STAGE, Batch, FirstStage, View
from crmatch.data.settings import Setting
from crmatch.errors import RequestError
from crmatch.strict_model import StrictModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from crmatch.networks.network import Network, NetworkShape

LABELED = View("labeled", "labeled", "weak")
WEAK = View("weak", "unlabeled", "weak")
SECOND_WEAK = View("second_weak", "unlabeled", "weak")
STRONG = View("strong", "unlabeled", "strong")
SHORTEST_RAMP = 16_384
"""Steps of the shortest published ramp: 1,024 * 1,024 images in MixMatch's and ReMixMatch's code."""


QUICK_EMA_DECAY = 0.99
"""Decay of the EMA of the weights in the recipe `quick`."""
QUICK_LABELED_BATCH = 16
"""Labeled images per step of every method in the recipe `quick`: with larger batches a short run overfits its few labels."""


class Models(NamedTuple):
    """The trained network (student) and the moving average of its weights (teacher)."""

    student: Network
    teacher: Network


class Step(NamedTuple):
    """Progress of the run, and the random generators of one step.

    Attributes:
        number: 0 for the first step.
        total: length of the run in steps.
        generator: maps the name of a random stream, e.g. `mixup`, to a new generator for this step.
        ema_decay: decay of the teacher's moving average; running averages of a method use it by default.
        first_stage: steps at the beginning of the run on labeled images alone.
    """

    number: int
    total: int
    generator: Callable[[str], torch.Generator]
    ema_decay: float = 0.999
    first_stage: int = 0

    def ramp(self, steps: float) -> float:
        """Linear ramp-up from 0 to 1 over the first `steps` steps: min(1, t / steps)."""
        return min(1.0, self.number / steps)


class Refresh(NamedTuple):
    """What a periodic refresh may use: the models, and features of all training images.

    Attributes:
        models: student and teacher.
        step: the step before which the refresh takes place.
        labels: int64, classes of the labeled images, in the order of the pool.
        features: (pool, augmentation = "none") -> features (N, D) and probabilities (N, K) of all images of the pool
            "labeled" or "unlabeled", in order, from the student in eval mode. The augmentation is "none" or "weak".
    """

    models: Models
    step: Step
    labels: Tensor
    features: Callable[..., tuple[Tensor, Tensor]]


class PseudoLabels(NamedTuple):
    """Pseudo-labels of one step's unlabeled images, for training curves and warnings only.

    Attributes:
        labels: int64 (Bu,), predicted classes.
        used: (Bu,), weight of each image in the loss: a bool mask, or 0..1.
    """

    labels: Tensor
    used: Tensor

    @classmethod
    def all_used(cls, probabilities: Tensor) -> PseudoLabels:
        """The most probable classes of (Bu, K) probabilities, without a mask."""
        return cls(probabilities.argmax(dim=1), probabilities.new_ones(len(probabilities)))


@dataclass(frozen=True)
class LossTerms:
    """The terms of a loss and their weights, which are multiplied only in `total`.

    Attributes:
        terms: name -> scalar.
        weights: name -> factor, for the same names.
        monitors: name -> detached scalar that is logged but not trained on.
        pseudo_labels: of this step, if the method makes any.
    """

    terms: Mapping[str, Tensor]
    weights: Mapping[str, float]
    monitors: Mapping[str, Tensor] = field(default_factory=dict)
    pseudo_labels: PseudoLabels | None = None

    @cached_property
    def total(self) -> Tensor:
        """Sum over terms of weight * term."""
        return functools.reduce(operator.add, [self.weights[name] * term for name, term in self.terms.items()])


class Method(StrictModel, ABC):
    """A semi-supervised method: immutable hyper-parameters and a loss.

    Every term of the loss has a weight. A weight of exactly 0 also removes what only that term needs: its views, its images
    in the forward pass, its head.
    """

    name: str = ""
    code: str | None = None
    """Of a method from outside the package: its file or module, its class, and a checksum of the file's content."""
    title: ClassVar[str] = ""
    """Name in tables; the name of the class if there is none."""
    summary: ClassVar[str] = ""
    """One line for `crmatch show methods`."""
    paper: ClassVar[str] = ""
    """Citation."""
    evaluated: ClassVar[Literal["ema", "raw"]] = "ema"
    """Whether the error of the EMA weights or of the raw weights is reported. Both are recorded."""
    running_statistics: ClassVar[Literal["all", "labeled", "mixed"]] = "all"
    """The forward pass that updates the running statistics of batch norms: over all views together, over the labeled images,
    or over the images mixed by MixUp. All other passes of a step go through `forward_without_bn_update`."""
    works_on_features: ClassVar[bool] = False
    """Whether weak and strong views are all that the method needs, so that it can train on stored features."""
    reference_steps: ClassVar[int] = 2**20
    """Length of the published runs, for which the method's `..._steps` are given."""

    def __eq__(self, other: object) -> bool:
        """Methods are equal if their values are, so that a stored method equals the one it was stored from."""
        return isinstance(other, Method) and self.model_dump(mode="json") == other.model_dump(mode="json")

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @classmethod
    def recipe_keys(cls, recipe: str, setting: Setting) -> dict[str, Any]:
        """Keys of the spec that this method's papers and code set for a data set in one of the recipes."""
        return {}

    def scaled(self, steps: int, total: int) -> int:
        """Convert `steps` of a run of `reference_steps` to a run of `total` steps: in proportion, at least 1."""
        return max(1, round(steps * total / self.reference_steps))

    def ramp(self, steps: float, step: Step) -> float:
        """Linear ramp-up from 0 to 1 over `steps` steps of a run of `reference_steps`.

        A shorter run has a shorter ramp, in proportion, but not below `SHORTEST_RAMP` steps: a network needs as many steps in a
        short run until its guesses are better than chance. So a short run ends at the weight that it has reached.
        """
        return step.ramp(max(steps * step.total / self.reference_steps, min(steps, SHORTEST_RAMP)))

    @property
    @abstractmethod
    def views(self) -> tuple[View, ...]:
        """The views the loss needs, in the order of the joint forward pass."""

    @property
    def extra_batch_size(self) -> int:
        """Number of images per step in the source `extra`, a separate batch of unlabeled images."""
        return 0

    def extra_images(self, labeled: int, unlabeled: int) -> int:
        """Images in the joint forward pass that are not views, e.g. rotated copies, for batches of these sizes."""
        return 0

    def heads(self, shape: NetworkShape) -> dict[str, nn.Module]:
        """Modules trained in addition to backbone and classifier, and running state (as buffers, so that it is saved)."""
        return {}

    @abstractmethod
    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """All terms of the loss of one step."""

    def first_stage(self, labeled: int) -> FirstStage:
        """The stage before the method uses unlabeled images, given the number of labeled ones; none by default."""
        return NO_FIRST_STAGE

    def refresh_every(self, steps_per_epoch: int, total_steps: int) -> int | None:
        """Steps between two calls of `refresh`, or None for no refresh; an epoch is a pass over the unlabeled images."""
        return None

    def refresh_start(self, step: Step) -> int:
        """The step before which `refresh` is called for the first time, in the run that `step` belongs to."""
        return step.first_stage

    def refresh(self, context: Refresh) -> None:
        """Update running state that depends on the whole training set."""


class StoredMethod(Method):
    """A method in a record whose code is not here: its values can be shown, but it cannot be trained."""

    model_config = ConfigDict(extra="allow")

    @property
    def views(self) -> tuple[View, ...]:
        """Not known."""
        raise self.not_here()

    def loss(self, batch: Batch, models: Models, step: Step) -> LossTerms:
        """Not known."""
        raise self.not_here()

    def not_here(self) -> RequestError:
        """The error for using the method."""
        found = f"the method {self.name} is known from its runs only: its code is not here"
        return RequestError(f"{found}.\nInstall it, or name its file: --method PATH/mine.py:ClassName")


def drop_zeros(**weights: float) -> dict[str, float]:
    """The weights other than 0."""
    return {name: weight for name, weight in weights.items() if weight}


def spec_keys(section: str, **values: Any) -> dict[str, Any]:
    """Keys of a section of the spec, for example {"plan.steps": 5} for section "plan" and steps=5."""
    return {f"{section}.{key}": value for key, value in values.items()}


def equal_batches(recipe: str) -> dict[str, Any]:
    """Methods older than FixMatch have as many unlabeled as labeled images per step; in `quick`, all methods have the same."""
    return {} if recipe == "quick" else spec_keys("plan", labeled_batch_size=64, unlabeled_batch_size=64)


def original_optimizer(weight_decay: float = 0.02) -> dict[str, Any]:
    """Adam of google-research/mixmatch: constant rate 0.002, and weights shrink by rate * weight_decay per step."""
    adam = spec_keys("plan", optimizer="adam", learning_rate=0.002, schedule=[{"shape": "constant"}])
    return adam | spec_keys("plan", decay_rule="decoupled", weight_decay=weight_decay)


def older_recipe(recipe: str, original: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the methods older than FixMatch: equal batches; in `original` also Adam and `original`."""
    return equal_batches(recipe) | (original_optimizer() | dict(original) if recipe == "original" else {})
