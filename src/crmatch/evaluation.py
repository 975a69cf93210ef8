"""Measures of a model and of pseudo-labels; errors are in percent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.augment.batches import Normalizer
from crmatch.networks.network import Network

BATCH = 512


@torch.inference_mode()
def predict_probabilities(network: Network, images: Tensor, normalizer: Normalizer) -> Tensor:
    """Class probabilities (N, K) of unaugmented uint8 images (N, C, H, W), in eval mode."""
    was_training = network.training
    network.eval()
    parts = [network(normalizer(part)).logits.softmax(dim=1) for part in torch.split(images, BATCH)]
    network.train(was_training)
    return torch.cat(parts)


class Quality(NamedTuple):
    """How good predictions are.

    Attributes:
        error: percent of images whose most probable class is wrong.
        per_class: the same for each class; None where a class has no image.
        confusion: counts, rows the true classes, columns the predicted ones.
        calibration_error: expected calibration error in percent points (15 equal bins of confidence).
    """

    error: float
    per_class: list[float | None]
    confusion: list[list[int]]
    calibration_error: float


def measure(probabilities: Tensor, labels: Tensor) -> Quality:
    """Quality of `probabilities` (N, K) against `labels` (N,)."""
    classes = probabilities.shape[1]
    confidence, predicted = probabilities.max(dim=1)
    correct = predicted == labels
    confusion = torch.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
    images, right = confusion.sum(dim=1).tolist(), confusion.diag().tolist()
    return Quality(
        error=100 * int((~correct).sum()) / len(labels),
        per_class=[100 * (n - hits) / n if n else None for n, hits in zip(images, right, strict=True)],
        confusion=confusion.tolist(),
        calibration_error=_calibration_error(confidence, correct),
    )


def _calibration_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """Sum over bins of (n_b / N) * |accuracy_b - mean confidence_b|, in percent points."""
    which = (confidence * bins).long().clamp_max(bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    gap.index_add_(0, which, correct.double() - confidence.double())
    return 100 * gap.abs().sum().item() / len(confidence)


def pseudo_label_counts(predicted: Tensor, used: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Counts of one batch behind the paper's three curves; images whose true class is unknown count as neither.

    Args:
        predicted: int64 (Bu,), most probable classes on the weak view.
        used: (Bu,), how much each image counts in the loss, 0..1.
        truth: int64 (Bu,), true classes or -1; for curves only.
    """
    known = truth >= 0
    wrong = (predicted != truth) & known
    return {
        "count/used": used.double().mean(),
        "count/known": known.double().mean(),
        "count/wrong": wrong.double().mean(),
        "count/known_used": (known * used).double().mean(),
        "count/wrong_used": (wrong * used).double().mean(),
    }


def pseudo_label_quality(means: Mapping[str, float]) -> dict[str, float | None]:
    """The paper's three curves in percent from mean counts: error of all, error of the contributing, share contributing.

    Errors are weighted by images, so that a batch without a confident image says nothing instead of "all right".
    """

    def percent(part: float, whole: float) -> float | None:
        return 100 * part / whole if whole else None

    return {
        "pseudo_label_error": percent(means["count/wrong"], means["count/known"]),
        "contributing_error": percent(means["count/wrong_used"], means["count/known_used"]),
        "mask_rate": 100 * means["count/used"],
    }
