"""The equivariance probe (spec 7.3): a linear machine tells from frozen features whether a transformation was applied.

Features that kept the transformation give an error near 0 %, features that forgot it 50 %.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crmatch.analysis.curves import Summary, summarize
from crmatch.analysis.runs import FinishedRun, draws, open_run, pooled_features
from crmatch.analysis.svm import Floats, Samples, train_svm
from crmatch.analysis.transformations import TRANSFORMATIONS
from crmatch.errors import RequestError

REPEATS = 10
TRAINING_IMAGES = 1000
SMALL_SET = 2000
"""Test sets below this size give a fifth of their images to training."""
STRONG_AGAINST_WEAK = "strong against weak"
View = Callable[[Tensor, torch.Generator], Tensor]
Featurize = Callable[[Tensor], Tensor]


class Task(NamedTuple):
    """A question to features: was it `plain` or `changed`?"""

    plain: View
    changed: View


class Images(NamedTuple):
    """Images of one repeat: those that train the machine and those that judge it, uint8 (N, C, H, W)."""

    training: Tensor
    judging: Tensor


def probe(run: Path | str, *, repeats: int = REPEATS, data_dir: Path | None = None) -> dict[str, Summary]:
    """Error of the probe in percent on a finished run's features, by transformation: mean and deviation over repeats."""
    if repeats < 1:
        raise RequestError(f"--repeats must be 1 or more, found {repeats}.\nThe paper repeats 10 times.")
    finished = open_run(run, data_dir)
    images = finished.test.images
    if len(images) < 10:
        raise RequestError(f"{run} has {len(images)} test images.\nThe probe needs 10 or more.")

    def featurize(part: Tensor) -> Tensor:
        return pooled_features(finished.model, part)

    return {name: probe_task(name, task, images, featurize, repeats) for name, task in tasks(finished).items()}


def tasks(run: FinishedRun) -> dict[str, Task]:
    """The paper's five questions: four transformations against the original, and the run's strong against its weak views."""
    questions = {name: Task(_unchanged, change) for name, change in TRANSFORMATIONS.items()}
    return questions | {STRONG_AGAINST_WEAK: Task(run.weak, run.strong)}


def training_images(count: int) -> int:
    """How many of `count` test images train the probe: 1,000, or a fifth of a set of fewer than 2,000."""
    return TRAINING_IMAGES if count >= SMALL_SET else count // 5


def probe_task(name: str, task: Task, images: Tensor, featurize: Featurize, repeats: int = REPEATS) -> Summary:
    """Error of the machine in percent over `repeats` splits of `images`, each with its own draws.

    Every image gives one sample of each class. Training samples are drawn anew in every epoch, judging samples once.
    Features are standardized with mean and deviation of the unchanged training images' features.
    """
    return summarize([_repeat(name, task, _split(images, repeat), featurize, repeat) for repeat in range(repeats)])


def _repeat(name: str, task: Task, images: Images, featurize: Featurize, repeat: int) -> float:
    plain = featurize(images.training).double()
    mean, std = plain.mean(dim=0), plain.std(dim=0, correction=0)
    std = torch.where(std > 0, std, 1.0)

    def standardized(view: View, part: Tensor, purpose: str, epoch: int) -> Floats:
        if view is _unchanged and part is images.training:
            features = plain
        else:
            features = featurize(view(part, draws(repeat, f"{name}/{purpose}", epoch))).double()
        return ((features - mean) / std).numpy()

    def samples(part: Tensor, purpose: str, epoch: int) -> Samples:
        features = [
            standardized(task.plain, part, f"{purpose}/plain", epoch),
            standardized(task.changed, part, f"{purpose}/changed", epoch),
        ]
        return Samples(np.concatenate(features), np.repeat([-1.0, 1.0], len(part)))

    machine = train_svm(
        lambda epoch: samples(images.training, "training", epoch),
        lambda epoch: draws(repeat, f"{name}/order", epoch),
    )
    return machine.error(samples(images.judging, "judging", 0))


def _split(images: Tensor, repeat: int) -> Images:
    """Which images train and which judge; the same for all transformations and runs."""
    order = torch.randperm(len(images), generator=draws(repeat, "probe/split"))
    first = training_images(len(images))
    return Images(images[order[:first]], images[order[first:]])


def _unchanged(images: Tensor, randomness: torch.Generator) -> Tensor:
    return images
