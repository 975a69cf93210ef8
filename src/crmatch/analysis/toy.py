"""Figure 1, left: a two-class toy whose features are pulled together, pushed apart, or left alone.

Points of two half moons in the plane, three of each class labeled. Weak augmentation moves a point a little, strong
augmentation far. A small network maps points to two features, which can be drawn; it is trained with the product's own
losses: L_S + L_PseudoLabel + L_Dist, Eqs. (2) and (4).
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
"""Points of each class."""
MOON_NOISE, WEAK_NOISE, STRONG_NOISE = 0.12, 0.03, 0.35
STEPS, RATE, MOMENTUM, THRESHOLD = 600, 0.05, 0.9, 0.95
WIDTH = 32


class Toy(NamedTuple):
    """A trained toy.

    Attributes:
        weak: (N, 2) features of weakly moved unlabeled points.
        strong: (N, 2) features of the same points moved far.
        labels: (N,) their classes, 0 or 1.
        boundary: (3,), a, b and c of the line a x + b y + c = 0 where both classes are equally probable.
        error: test error in percent.
    """

    weak: NDArray[np.float64]
    strong: NDArray[np.float64]
    labels: NDArray[np.int64]
    boundary: NDArray[np.float64]
    error: float


def train_toy(mode: Mode, seed: int = 0) -> Toy:
    """Train the toy; all modes see the same points, initial weights and noise."""
    labeled, labels = _moons(LABELED, seed, "labeled")
    unlabeled, truth = _moons(UNLABELED, seed, "unlabeled")
    parameters = _initial(seed)
    velocity = [torch.zeros_like(one) for one in parameters]
    for step in range(STEPS):
        noise = generator(seed, "toy/noise", step)
        points = (
            _moved(labeled, WEAK_NOISE, noise),
            _moved(unlabeled, WEAK_NOISE, noise),
            _moved(unlabeled, STRONG_NOISE, noise),
        )
        gradients = torch.autograd.grad(_loss(parameters, points, labels, mode), parameters, allow_unused=True)
        rate = RATE * math.cos(7 * math.pi * step / (16 * STEPS))
        for one, speed, gradient in zip(parameters, velocity, gradients, strict=True):
            speed.mul_(MOMENTUM).add_(0 if gradient is None else gradient)
            one.data.sub_(speed, alpha=rate)
    return _result(parameters, unlabeled, truth, seed)


def _loss(parameters: list[Tensor], points: tuple[Tensor, Tensor, Tensor], labels: Tensor, mode: Mode) -> Tensor:
    features = [_features(parameters, part) for part in points]
    logits = [_logits(parameters, part) for part in features]
    confidence, pseudo_labels = logits[1].detach().softmax(dim=1).max(dim=1)
    confident = confidence > THRESHOLD
    total = cross_entropy(logits[0], labels).mean() + masked_mean(cross_entropy(logits[2], pseudo_labels), confident)
    if mode == "none":
        return total
    weak, strong = (part @ parameters[6].mT for part in features[1:])
    return total + masked_mean(feature_distance(strong, weak, "cosine", DIRECTIONS[mode]), confident)


def _result(parameters: list[Tensor], unlabeled: Tensor, truth: Tensor, seed: int) -> Toy:
    test, classes = _moons(TEST, seed, "test")
    noise = generator(seed, "toy/shown")
    with torch.no_grad():
        wrong = _logits(parameters, _features(parameters, test)).argmax(dim=1) != classes
        weak, strong = (_features(parameters, _moved(unlabeled, size, noise)) for size in (WEAK_NOISE, STRONG_NOISE))
        plane = torch.cat([parameters[4][1] - parameters[4][0], (parameters[5][1] - parameters[5][0])[None]])
    return Toy(weak.numpy(), strong.numpy(), truth.numpy(), plane.numpy(), 100 * wrong.double().mean().item())


def _features(parameters: list[Tensor], points: Tensor) -> Tensor:
    """Two layers: (N, 2) points to (N, 2) features."""
    hidden = torch.tanh(points @ parameters[0].mT + parameters[1])
    return hidden @ parameters[2].mT + parameters[3]


def _logits(parameters: list[Tensor], features: Tensor) -> Tensor:
    return features @ parameters[4].mT + parameters[5]


def _initial(seed: int) -> list[Tensor]:
    """Weights and biases of both layers and the classifier, and the projection z."""
    random = generator(seed, "toy/init")
    weights = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((WIDTH, 2), (2, WIDTH), (2, 2), (2, 2))]
    scaled = [one / math.sqrt(one.shape[1]) for one in weights]
    biases = [torch.zeros(len(one), dtype=torch.float64) for one in scaled[:3]]
    parameters = [scaled[0], biases[0], scaled[1], biases[1], scaled[2], biases[2], scaled[3]]
    return [one.requires_grad_() for one in parameters]


def _moons(count: int, seed: int, which: str) -> tuple[Tensor, Tensor]:
    """Two half moons that reach into each other, `count` points each: (2 count, 2) and classes."""
    random = generator(seed, f"toy/{which}")
    angles = math.pi * torch.rand(2, count, generator=random, dtype=torch.float64)
    first = torch.stack((angles[0].cos(), angles[0].sin()), dim=1)
    second = torch.stack((1 - angles[1].cos(), 0.5 - angles[1].sin()), dim=1)
    points = torch.cat((first, second)) - torch.tensor([0.5, 0.25], dtype=torch.float64)
    return _moved(points, MOON_NOISE, random), torch.arange(2).repeat_interleave(count)


def _moved(points: Tensor, size: float, random: torch.Generator) -> Tensor:
    return points + size * torch.randn(points.shape, generator=random, dtype=torch.float64)
