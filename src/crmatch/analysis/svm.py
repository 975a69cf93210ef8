"""A linear support vector machine trained by stochastic gradient descent, with its gradient written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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
