"""What a model says about single images: its most confident mistakes, where it is least certain, calibration."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15
"""Equal bins of confidence, as in the calibration error."""


class Prediction(NamedTuple):
    """One image's prediction.

    Attributes:
        row: which image.
        predicted: its most probable class.
        second: the next one.
        confidence: probability of the most probable class, 0..1.
        truth: its true class; -1 where unknown.
    """

    row: int
    predicted: int
    second: int
    confidence: float
    truth: int


class Bin(NamedTuple):
    """Images whose confidence lies in low..high: their number, mean confidence and share of right predictions (0 if none)."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def confident_mistakes(probabilities: Tensor, labels: Tensor, count: int) -> list[Prediction]:
    """Up to `count` wrongly classified images of (N, K) probabilities, the most confident first."""
    confidence, predicted = probabilities.max(dim=1)
    wrong = ((predicted != labels) & (labels >= 0)).nonzero().squeeze(1)
    order = confidence[wrong].argsort(descending=True, stable=True)[:count]
    return _predictions(probabilities, labels, wrong[order])


def least_certain(probabilities: Tensor, labels: Tensor, count: int) -> list[Prediction]:
    """Up to `count` images of (N, K) probabilities, those of the lowest confidence first."""
    return _predictions(probabilities, labels, probabilities.amax(dim=1).argsort(stable=True)[:count])


def reliability(probabilities: Tensor, labels: Tensor) -> list[Bin]:
    """Confidence against accuracy in equal bins: sum_b (n_b / N) |accuracy_b - confidence_b| is the calibration error."""
    confidence, predicted = probabilities.double().max(dim=1)
    which = (probabilities.amax(dim=1) * BINS).long().clamp_max(BINS - 1)
    images = torch.bincount(which, minlength=BINS)
    zeros = torch.zeros(BINS, dtype=torch.float64)
    sums = (zeros.index_add(0, which, confidence), zeros.index_add(0, which, (predicted == labels).double()))
    means = [(total / images.clamp_min(1)).tolist() for total in sums]
    rows = zip(images.tolist(), *means, strict=True)
    return [Bin(place / BINS, (place + 1) / BINS, *row) for place, row in enumerate(rows)]


def _predictions(probabilities: Tensor, labels: Tensor, rows: Tensor) -> list[Prediction]:
    confidence, classes = probabilities[rows].topk(2, dim=1)
    columns = (rows, classes[:, 0], classes[:, 1], confidence[:, 0], labels[rows])
    return [Prediction(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
