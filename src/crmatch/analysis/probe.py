"""The transformations of the equivariance probe: torchvision's definitions on batches, every pixel as Pillow has it.

Draw first, then apply; nearest neighbors and black outside, as torchvision's defaults.

A linear support vector machine trained by stochastic gradient descent, with its gradient written out.

The equivariance probe (spec 7.3): a linear machine tells from frozen features whether a transformation was applied.

Features that kept the transformation give an error near 0 %, features that forgot it 50 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.analysis.curves import Summary, summarize
from crmatch.analysis.finished_run import FinishedRun, draws, open_run, pooled_features
from crmatch.augment.kernels.geometry import slide
from crmatch.augment.operations import apply_operation, check_images
from crmatch.augment.weak import ColorJitter
from crmatch.errors import RequestError

LARGEST_MOVE = 0.3
SCALES = (0.5, 0.9)
LARGEST_ANGLE = 30.0


def translated(images: Tensor, randomness: torch.Generator) -> Tensor:
    """``RandomAffine(0, translate=(.3, .3))``: moved by whole pixels, round(uniform(-.3 side, .3 side)) along each axis."""
    check_images(images)
    height, width = images.shape[2:]
    reach = torch.tensor([LARGEST_MOVE * width, LARGEST_MOVE * height], dtype=torch.float64)
    moves = (_uniform(2 * len(images), -1, 1, randomness).view(-1, 2) * reach).round().long().numpy()
    rows = np.arange(height) - moves[:, 1:]
    return slide(images.contiguous(), rows, np.broadcast_to(-moves[:, :1], rows.shape).copy())


def scaled(images: Tensor, randomness: torch.Generator) -> Tensor:
    """``RandomAffine(0, scale=(.5, .9))``: shrunk around the center."""
    return apply_operation("scale", images, _uniform(len(images), *SCALES, randomness))


def rotated(images: Tensor, randomness: torch.Generator) -> Tensor:
    """``RandomRotation(30)``: turned by uniform(-30, 30) degrees around the center."""
    return apply_operation("rotate", images, _uniform(len(images), -LARGEST_ANGLE, LARGEST_ANGLE, randomness))


def jittered(images: Tensor, randomness: torch.Generator) -> Tensor:
    """``ColorJitter(.4, .4, .4, .1)``: brightness, contrast, saturation and hue in random order."""
    jitter = ColorJitter()
    return jitter.apply(images, jitter.draw(len(images), randomness))


TRANSFORMATIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "translation": translated,
    "scaling": scaled,
    "rotation": rotated,
    "color jitter": jittered,
}


def _uniform(count: int, low: float, high: float, randomness: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=randomness, dtype=torch.float64)


Floats = NDArray[np.float64]
EPOCHS = 50
BATCH = 64
LEARNING_RATE = 0.001
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4


class Samples(NamedTuple):
    """Features (N, D) and classes -1 or 1 (N,)."""

    features: Floats
    classes: Floats


class SVM(NamedTuple):
    """The separating plane: class = sign(features @ weights + bias)."""

    weights: Floats
    bias: float

    def error(self, samples: Samples) -> float:
        """Percent of samples on the wrong side; the plane itself counts as wrong."""
        margins = samples.classes * (samples.features @ self.weights + self.bias)
        return 100 * float(np.mean(margins <= 0))


def train_svm(samples: Callable[[int], Samples], randomness: Callable[[int], torch.Generator], epochs: int = EPOCHS) -> SVM:
    """Minimize mean max(0, 1 - y (w.v + b)) + decay |w|^2 / 2 by SGD with momentum, in batches, the rate falling as a cosine.

    One step on a batch of size B, active where y (w.v + b) < 1:
        g_w = -(1/B) sum_active y v + decay w,  g_b = -(1/B) sum_active y,
        velocity = momentum velocity + g,  (w, b) = (w, b) - rate_t velocity,  rate_t = rate (1 + cos(pi t / T)) / 2.

    Args:
        samples: the training samples of each epoch, always of the same size.
        randomness: the generator of each epoch's order.
        epochs: how many there are.
    """
    parameters = velocity = np.zeros(0)
    step = steps = 0
    for epoch in range(epochs):
        features, classes = samples(epoch)
        if epoch == 0:
            parameters, velocity = np.zeros(features.shape[1] + 1), np.zeros(features.shape[1] + 1)
            steps = epochs * math.ceil(len(classes) / BATCH)
        order = torch.randperm(len(classes), generator=randomness(epoch)).numpy()
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            rate = LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2
            velocity = MOMENTUM * velocity + hinge_gradient(parameters, features[chosen], classes[chosen])
            parameters = parameters - rate * velocity
            step += 1
    return SVM(parameters[:-1], float(parameters[-1]))


def hinge_gradient(parameters: Floats, features: Floats, classes: Floats) -> Floats:
    """Gradient of mean max(0, 1 - y (w.v + b)) + decay |w|^2 / 2 with respect to (w, b): (D + 1,); the bias does not decay."""
    weights, bias = parameters[:-1], parameters[-1]
    active = np.where(classes * (features @ weights + bias) < 1, classes, 0.0)
    gradient = np.append(active @ features, active.sum()) / -len(classes)
    gradient[:-1] += WEIGHT_DECAY * weights
    return gradient


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
