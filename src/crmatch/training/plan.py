"""The training plan: length, batch sizes, optimizer, learning-rate schedule. Imports no torch.

Phases of a schedule are shares of the run, so that a shorter run keeps the shape of its schedule.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from crmatch.strict_model import StrictModel


class Phase(StrictModel):
    """One part of a learning-rate schedule; u runs from 0 to 1 over the phase.

    `constant`: start. `linear`: start + u (end - start). `cosine`: start * cos(pi * arc * u), whose 7/16 arc ends at 0.195.
    `half_cosine`: start * (1 + cos(pi * arc * u)) / 2, where an arc below 1 stops before zero.
    """

    share: float = Field(1.0, gt=0, le=1)
    """Part of the run this phase takes."""
    shape: Literal["constant", "linear", "cosine", "half_cosine"] = "constant"
    start: float = Field(1.0, ge=0)
    end: float = Field(1.0, ge=0)
    """Only for `linear`."""
    arc: float = Field(1.0, gt=0, le=1)
    """Only for the cosines."""

    def factor(self, progress: float) -> float:
        """The factor at `progress` (u) within the phase."""
        if self.shape == "linear":
            return self.start + progress * (self.end - self.start)
        if self.shape == "cosine":
            return self.start * math.cos(math.pi * self.arc * progress)
        if self.shape == "half_cosine":
            return self.start * (1 + math.cos(math.pi * self.arc * progress)) / 2
        return self.start


COSINE_7_16 = (Phase(shape="cosine", arc=7 / 16),)
"""FixMatch's rule: lr * cos(7 pi t / (16 T))."""


class TrainPlan(StrictModel):
    """Length, batch sizes, optimizer, schedule and EMA of a run."""

    steps: int | None = Field(None, ge=1, le=10**9)
    """Optimizer updates."""
    minutes: float | None = Field(None, gt=0, le=10**6)
    """The time that was asked for; `steps` was then chosen from the speed of the first steps."""
    unlabeled_epochs: float | None = Field(None, gt=0, le=10**6)
    """Length in passes over the unlabeled images, instead of `steps`."""
    start_size: int | None = Field(None, ge=8)
    """Side of the images in the first steps, below `data.image_size` (progressive resizing); None: all have the full size."""
    start_share: float = Field(0.5, gt=0, lt=1)
    """Share of the steps with images of `start_size`."""
    labeled_batch_size: int = Field(64, ge=1, le=2**16)
    unlabeled_batch_size: int = Field(448, ge=1, le=2**16)
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: float = Field(0.03, gt=0)
    backbone_rate: float = Field(1.0, ge=0, le=1)
    """Factor of the learning rate for the backbone; below 1 for one that is pretrained."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Only for `sgd`."""
    nesterov: bool = True
    """Only for `sgd`."""
    weight_decay: float = Field(5e-4, ge=0)
    decay_rule: Literal["l2", "decoupled"] = "l2"
    """`l2` adds decay * w to the gradient; `decoupled` shrinks w by lr * decay each step."""
    decay_parameters: Literal["weights", "all"] = "weights"
    """`weights`: only kernels of convolutions and linear layers decay, not biases and batch norms."""
    schedule: tuple[Phase, ...] = COSINE_7_16
    ema_decay: float = Field(0.999, ge=0, lt=1)
    ema_warmup: bool | Literal["mean"] = False
    """True: the decay at step t is min(decay, (1 + t) / (10 + t)). `mean`: min(decay, 1 - 1 / (t + 1)), the plain mean of all
    weights so far until the decay is reached."""
    evaluate_every: int = Field(1024, ge=1)
    """At most so many steps between evaluations; a short run is evaluated at least four times."""
    log_every: int = Field(64, ge=1)
    checkpoint_every: int = Field(1024, ge=1)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.steps is None) == (self.unlabeled_epochs is None):
            raise ValueError("give the length either as steps or as unlabeled_epochs, not both and not neither")
        if not math.isclose(total := sum(phase.share for phase in self.schedule), 1.0, abs_tol=1e-9):
            raise ValueError(f"the shares of the schedule's phases must add up to 1, found {total:g}")
        if self.optimizer == "sgd" and self.decay_rule == "decoupled":
            raise ValueError("decay_rule decoupled needs optimizer adam; sgd has l2")
        if self.nesterov and self.optimizer == "sgd" and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def steps_per_epoch(self, unlabeled: int) -> int:
        """Steps in one pass over `unlabeled` images."""
        return math.ceil(unlabeled / self.unlabeled_batch_size)

    def total_steps(self, unlabeled: int, first_stage: int = 0) -> int:
        """Length of the run in steps, given the number of unlabeled images.

        The first stage, in steps, is part of `steps` and comes before `unlabeled_epochs`.
        """
        if self.steps is not None:
            return self.steps
        assert self.unlabeled_epochs is not None
        return first_stage + max(1, math.ceil(self.unlabeled_epochs * self.steps_per_epoch(unlabeled)))

    def start_steps(self, total: int) -> int:
        """How many of `total` steps have images of `start_size`."""
        return 0 if self.start_size is None else round(self.start_share * total)

    def rate_factor(self, step: int, total: int, first_stage: int = 0) -> float:
        """Factor of the learning rate at `step` of `total`. A first stage has the first phase of the schedule for itself."""
        if step < first_stage:
            return self.schedule[0].factor(step / first_stage)
        progress, passed = (step - first_stage) / (total - first_stage), 0.0
        for phase in self.schedule[:-1]:
            if progress < passed + phase.share:
                return phase.factor((progress - passed) / phase.share)
            passed += phase.share
        last = self.schedule[-1]
        return last.factor(min(1.0, (progress - passed) / last.share))
