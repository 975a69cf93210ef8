"""The equivariance probe: can a linear SVM tell from frozen features whether a transformation was applied?

Features that keep the transformation give an error near 0 %, features that are invariant to it 50 %. The transformations
are torchvision's, applied to batches, with every pixel as Pillow computes it: nearest neighbors, black outside the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.analysis.curves import Summary, summarize
from crmatch.analysis.finished_run import draws, open_run
from crmatch.augment.kernels.geometry import slide
from crmatch.augment.operations import apply_operation, apply_sequence
from crmatch.augment.weak import draw_jitter
from crmatch.errors import RequestError
from crmatch.runs.workspace import Workspace

REPEATS = 10
STRONG_AGAINST_WEAK = "strong against weak"
EPOCHS, BATCH, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 50, 64, 0.001, 0.9, 1e-4
View = Callable[[Tensor, torch.Generator], Tensor]
Task = tuple[View, View]
"""A binary question: do features belong to a plain view of an image or to a changed one?"""
Featurize = Callable[[Tensor], Tensor]
Floats = NDArray[np.float64]


def _unchanged(images: Tensor, randomness: torch.Generator) -> Tensor:
    return images


def _translated(images: Tensor, randomness: torch.Generator) -> Tensor:
    """Moved by round(uniform(-.3 side, .3 side)) whole pixels along each axis."""
    height, width = images.shape[2:]
    reach = torch.tensor([0.3 * width, 0.3 * height], dtype=torch.float64)
    moves = (_uniform(2 * len(images), -1, 1, randomness).view(-1, 2) * reach).round().long().numpy()
    rows = np.arange(height) - moves[:, 1:]
    return slide(images.contiguous(), rows, np.broadcast_to(-moves[:, :1], rows.shape).copy())


def _jittered(images: Tensor, randomness: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation and hue in random order."""
    return apply_sequence(images, *draw_jitter(len(images), randomness))


def _operation(name: str, low: float, high: float) -> View:
    return lambda images, random: apply_operation(name, images, _uniform(len(images), low, high, random))


def _uniform(count: int, low: float, high: float, randomness: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(count, generator=randomness, dtype=torch.float64)


TRANSFORMATIONS: dict[str, View] = {
    "translation": _translated,  # RandomAffine(0, translate=(.3, .3))
    "scaling": _operation("scale", 0.5, 0.9),  # RandomAffine(0, scale=(.5, .9))
    "rotation": _operation("rotate", -30, 30),  # RandomRotation(30)
    "color jitter": _jittered,  # ColorJitter(.4, .4, .4, .1)
}


def probe(
    run: Path | str, workspace: Workspace, *, repeats: int = REPEATS, progress: Callable[[int, int], None] | None = None
) -> dict[str, Summary]:
    """Error of the probe in percent by transformation, mean and deviation over `repeats`, on the test set of a run.

    The paper's five questions: four transformations against the original, and the run's strong against its weak views.
    """
    if repeats < 1:
        raise RequestError(f"--repeats must be 1 or more, found {repeats}.\nThe paper repeats 10 times.")
    finished = open_run(run, workspace)
    images = finished.test.images
    if len(images) < 10:
        raise RequestError(f"{run} has {len(images)} test images.\nThe probe needs 10 or more.")
    tasks: dict[str, Task] = {name: (_unchanged, changed) for name, changed in TRANSFORMATIONS.items()}
    tasks[STRONG_AGAINST_WEAK] = finished.weak, finished.strong
    found: dict[str, Summary] = {}
    for name, task in tasks.items():

        def repeated(done: int) -> None:
            if progress:
                progress(len(found) * repeats + done, len(tasks) * repeats)

        found[name] = probe_task(name, task, images, finished.model.features, repeats, repeated)
    return found


def probe_task(
    name: str,
    task: Task,
    images: Tensor,
    featurize: Featurize,
    repeats: int = REPEATS,
    progress: Callable[[int], None] | None = None,
) -> Summary:
    """Error of the SVM in percent over `repeats` splits of `images`, each with its own draws.

    Every image gives one sample of each class. Training samples are drawn again in every epoch, test samples once.
    Features are standardized with mean and deviation of the unchanged training images' features.
    """
    errors: list[float] = []
    for repeat in range(repeats):
        if progress:
            progress(repeat)
        errors.append(_repeat(name, task, images, featurize, repeat))
    return summarize(errors)


def training_images(count: int) -> int:
    """How many of `count` test images train the probe: 1,000, or a fifth of a set of fewer than 2,000."""
    return 1000 if count >= 2000 else count // 5


def _repeat(name: str, task: Task, images: Tensor, featurize: Featurize, repeat: int) -> float:
    # The split does not depend on transformation or run.
    order = torch.randperm(len(images), generator=draws(repeat, "probe/split"))
    training, judging = (images[part] for part in order.tensor_split([training_images(len(images))]))
    plain = featurize(training).double()
    mean, std = plain.mean(dim=0), plain.std(dim=0, correction=0)
    std = torch.where(std > 0, std, 1.0)

    def standardized(view: View, part: Tensor, purpose: str, epoch: int) -> Floats:
        if view is _unchanged and part is training:
            features = plain
        else:
            features = featurize(view(part, draws(repeat, f"{name}/{purpose}", epoch))).double()
        return ((features - mean) / std).numpy()

    def samples(part: Tensor, purpose: str, epoch: int) -> tuple[Floats, Floats]:
        """Features (2N, D) and classes -1 or 1 (2N,)."""
        plain_and_changed = zip(task, ("plain", "changed"), strict=True)
        features = [standardized(view, part, f"{purpose}/{kind}", epoch) for view, kind in plain_and_changed]
        return np.concatenate(features), np.repeat([-1.0, 1.0], len(part))

    weights, bias = train_svm(
        lambda epoch: samples(training, "training", epoch), lambda epoch: draws(repeat, f"{name}/order", epoch)
    )
    return svm_error(weights, bias, *samples(judging, "judging", 0))


def train_svm(
    samples: Callable[[int], tuple[Floats, Floats]], randomness: Callable[[int], torch.Generator], epochs: int = EPOCHS
) -> tuple[Floats, float]:
    """Weights w and bias b that minimize mean max(0, 1 - y (w.v + b)) + decay |w|^2 / 2, found by SGD with momentum.

    One step on a batch of size B, with the sums over samples that violate the margin, y (w.v + b) < 1:
        g_w = -(1/B) sum y v + decay w,  g_b = -(1/B) sum y,
        velocity = momentum velocity + g,  (w, b) = (w, b) - rate_t velocity,  rate_t = rate (1 + cos(pi t / T)) / 2.

    Args:
        samples: features (N, D) and classes -1 or 1 (N,) of each epoch, N always the same.
        randomness: the generator of each epoch's order.
        epochs: number of epochs.
    """
    parameters = velocity = np.zeros(0)
    step = steps = 0
    for epoch in range(epochs):
        features, classes = samples(epoch)
        if epoch == 0:
            parameters = velocity = np.zeros(features.shape[1] + 1)
            steps = epochs * math.ceil(len(classes) / BATCH)
        order = torch.randperm(len(classes), generator=randomness(epoch)).numpy()
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            v, y, weights, bias = features[batch], classes[batch], parameters[:-1], parameters[-1]
            active = np.where(y * (v @ weights + bias) < 1, y, 0.0)
            gradient = np.append(active @ v, active.sum()) / -len(batch)
            gradient[:-1] += WEIGHT_DECAY * weights  # the bias does not decay
            velocity = MOMENTUM * velocity + gradient
            parameters = parameters - LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2 * velocity
            step += 1
    return parameters[:-1], float(parameters[-1])


def svm_error(weights: Floats, bias: float, features: Floats, classes: Floats) -> float:
    """Percent of samples on the wrong side of the plane; a sample on the plane is wrong."""
    return 100 * float(np.mean(classes * (features @ weights + bias) <= 0))
