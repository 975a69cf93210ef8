"""Figure 1, left: a two-class toy problem with and without a feature distance loss.

The points form two half moons in the plane; three of each class are labeled. Weak augmentation adds little noise to a
point, strong augmentation much. A small network maps points to two features, which can be drawn. It is trained with the
package's own losses, L_S + L_PseudoLabel + L_Dist of Eqs. (2) and (4).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.losses import Direction, cross_entropy, feature_distance, masked_mean
from crmatch.randomness import generator

Mode = Literal["none", "pull", "push"]
MODES: tuple[Mode, ...] = ("none", "pull", "push")
DIRECTIONS: dict[Mode, Direction] = {"pull": "invariance", "push": "equivariance"}
LABELED, UNLABELED, TEST = 3, 150, 1000
"""Number of points of each class."""
MOON_NOISE, WEAK_NOISE, STRONG_NOISE = 0.12, 0.03, 0.35
STEPS, RATE, MOMENTUM, THRESHOLD = 600, 0.05, 0.9, 0.95
WIDTH = 32


class Toy(NamedTuple):
    """Features of the N unlabeled points by a trained toy network."""

    weak: NDArray[np.float64]  # (N, 2), of weak views
    strong: NDArray[np.float64]  # (N, 2), of strong views of the same points
    labels: NDArray[np.int64]  # (N,), true classes 0 or 1
    boundary: NDArray[np.float64]  # (3,), a, b and c of the decision boundary a x + b y + c = 0
    error: float  # test error in percent


class _Network(NamedTuple):
    """Weights and biases of two layers and of the classifier, and the projection z."""

    hidden: Tensor
    feature: Tensor
    classifier: Tensor
    projection: Tensor
    hidden_bias: Tensor
    feature_bias: Tensor
    classifier_bias: Tensor

    def features(self, points: Tensor) -> Tensor:
        """(N, 2) points to (N, 2) features."""
        return torch.tanh(points @ self.hidden.mT + self.hidden_bias) @ self.feature.mT + self.feature_bias

    def logits(self, features: Tensor) -> Tensor:
        return features @ self.classifier.mT + self.classifier_bias


def _initial(seed: int) -> _Network:
    random = generator(seed, "toy/init")
    shapes = ((WIDTH, 2), (2, WIDTH), (2, 2), (2, 2))
    weights = [torch.randn(shape, generator=random, dtype=torch.float64) / math.sqrt(shape[1]) for shape in shapes]
    biases = [torch.zeros(len(one), dtype=torch.float64) for one in weights[:3]]
    return _Network(*(one.requires_grad_() for one in (*weights, *biases)))


def train_toy(mode: Mode, seed: int = 0) -> Toy:
    """Train the toy network; all modes see the same points, initial weights and noise."""
    labeled, labels = _moons(LABELED, seed, "labeled")
    unlabeled, truth = _moons(UNLABELED, seed, "unlabeled")
    network = _initial(seed)
    velocity = [torch.zeros_like(one) for one in network]
    for step in range(STEPS):
        noise = generator(seed, "toy/noise", step)
        # The labeled points, and weak and strong views of the unlabeled ones.
        inputs = ((labeled, WEAK_NOISE), (unlabeled, WEAK_NOISE), (unlabeled, STRONG_NOISE))
        loss = _loss(network, [_noisy(points, size, noise) for points, size in inputs], labels, mode)
        gradients = torch.autograd.grad(loss, network, allow_unused=True)
        rate = RATE * math.cos(7 * math.pi * step / (16 * STEPS))
        for one, speed, gradient in zip(network, velocity, gradients, strict=True):
            speed.mul_(MOMENTUM).add_(0 if gradient is None else gradient)
            one.data.sub_(speed, alpha=rate)
    return _result(network, unlabeled, truth, seed)


def _loss(network: _Network, views: list[Tensor], labels: Tensor, mode: Mode) -> Tensor:
    features = [network.features(view) for view in views]
    logits, weak_logits, strong_logits = (network.logits(part) for part in features)
    confidence, pseudo_labels = weak_logits.detach().softmax(dim=1).max(dim=1)
    confident = confidence > THRESHOLD
    total = cross_entropy(logits, labels).mean() + masked_mean(cross_entropy(strong_logits, pseudo_labels), confident)
    if mode == "none":
        return total
    weak, strong = (part @ network.projection.mT for part in features[1:])
    return total + masked_mean(feature_distance(strong, weak, "cosine", DIRECTIONS[mode]), confident)


@torch.no_grad()
def _result(network: _Network, unlabeled: Tensor, truth: Tensor, seed: int) -> Toy:
    test, classes = _moons(TEST, seed, "test")
    noise = generator(seed, "toy/shown")
    wrong = network.logits(network.features(test)).argmax(dim=1) != classes
    weak, strong = (network.features(_noisy(unlabeled, size, noise)) for size in (WEAK_NOISE, STRONG_NOISE))
    weights, bias = network.classifier, network.classifier_bias
    boundary = torch.cat([weights[1] - weights[0], (bias[1] - bias[0])[None]])
    return Toy(weak.numpy(), strong.numpy(), truth.numpy(), boundary.numpy(), 100 * wrong.double().mean().item())


def _moons(count: int, seed: int, which: str) -> tuple[Tensor, Tensor]:
    """Two interleaving half moons of `count` points each: points (2 count, 2) and their classes."""
    random = generator(seed, f"toy/{which}")
    angles = math.pi * torch.rand(2, count, generator=random, dtype=torch.float64)
    first = torch.stack((angles[0].cos(), angles[0].sin()), dim=1)
    second = torch.stack((1 - angles[1].cos(), 0.5 - angles[1].sin()), dim=1)
    points = torch.cat((first, second)) - torch.tensor([0.5, 0.25], dtype=torch.float64)
    return _noisy(points, MOON_NOISE, random), torch.arange(2).repeat_interleave(count)


def _noisy(points: Tensor, size: float, random: torch.Generator) -> Tensor:
    return points + size * torch.randn(points.shape, generator=random, dtype=torch.float64)
