"""Predictions in batches, and the quality of models and of pseudo-labels; errors are in percent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.augment.batches import Normalizer
from crmatch.errors import DivergedError
from crmatch.networks.network import Network
from crmatch.training.meter import sum_dtype

BATCH = 512
BINS = 15
"""Number of equal bins of confidence in the calibration error and in reliability diagrams."""


@torch.inference_mode()
def predict(network: Network, images: Tensor, normalizer: Normalizer) -> tuple[Tensor, Tensor]:
    """Class probabilities (N, K) and pooled features (N, D) of unaugmented uint8 images (N, C, H, W), in eval mode.

    The images pass through the network in batches; the feature maps of a batch are freed before the next one.
    """
    was_training = network.training
    network.eval()
    probabilities, features = [], []
    for part in torch.split(images, BATCH):
        outputs = network(normalizer(part))
        probabilities.append(outputs.logits.softmax(dim=1))
        features.append(outputs.features)
    network.train(was_training)
    return torch.cat(probabilities), torch.cat(features)


def predict_probabilities(network: Network, images: Tensor, normalizer: Normalizer) -> Tensor:
    """Class probabilities (N, K) of unaugmented uint8 images (N, C, H, W), in eval mode."""
    return predict(network, images, normalizer)[0]


class Quality(NamedTuple):
    """How good predictions are."""

    error: float  # percent of images whose most probable class is wrong
    per_class: list[float | None]  # the same for each class; None for a class without images
    confusion: list[list[int]]  # counts; rows are true classes, columns are predicted classes
    calibration_error: float  # expected calibration error in percentage points (15 equal bins of confidence)


def finite(probabilities: Tensor) -> Tensor:
    """The probabilities; raises a `DivergedError` if they are not numbers, because the weights are too large."""
    if not probabilities.isfinite().all():
        raise DivergedError("the predictions of the test images are not finite.\nTry a smaller plan.learning_rate.")
    return probabilities


def measure(probabilities: Tensor, labels: Tensor) -> Quality:
    """Quality of `probabilities` (N, K) against `labels` (N,)."""
    classes = probabilities.shape[1]
    predicted = probabilities.argmax(dim=1)
    confusion = torch.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
    images, right = confusion.sum(dim=1).tolist(), confusion.diag().tolist()
    bins = reliability(probabilities, labels)
    return Quality(
        error=100 * int((predicted != labels).sum()) / len(labels),
        per_class=[100 * (n - hits) / n if n else None for n, hits in zip(images, right, strict=True)],
        confusion=confusion.tolist(),
        calibration_error=100 * sum(one.images * abs(one.accuracy - one.confidence) for one in bins) / len(labels),
    )


class Bin(NamedTuple):
    """Images with a confidence in low..high: their number, mean confidence and accuracy (both 0 without images)."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def reliability(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> list[Bin]:
    """Confidence and accuracy in equal bins; sum_b (n_b / N) |accuracy_b - confidence_b| is the calibration error."""
    confidence, predicted = probabilities.max(dim=1)
    which = (confidence * bins).long().clamp_max(bins - 1)
    images = torch.bincount(which, minlength=bins)
    zeros = torch.zeros(bins, dtype=torch.float64, device=which.device)
    sums = zeros.index_add(0, which, confidence.double()), zeros.index_add(0, which, (predicted == labels).double())
    rows = zip(images.tolist(), *((total / images.clamp_min(1)).tolist() for total in sums), strict=True)
    return [Bin(place / bins, (place + 1) / bins, *row) for place, row in enumerate(rows)]


def pseudo_label_counts(predicted: Tensor, used: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Fractions of one batch from which the paper's three curves are computed.

    Args:
        predicted: int64 (Bu,), most probable classes on the weak view.
        used: (Bu,), the weight of each image in the loss, 0..1.
        truth: int64 (Bu,), true classes, or -1 if unknown; used for curves only.
    """
    known = truth >= 0
    wrong = (predicted != truth) & known
    shares = {"used": used, "known": known, "wrong": wrong, "known_used": known * used, "wrong_used": wrong * used}
    return {f"count/{name}": share.to(sum_dtype(share.device)).mean() for name, share in shares.items()}


def pseudo_label_quality(means: Mapping[str, float]) -> dict[str, float | None]:
    """The paper's three curves in percent: error of all pseudo-labels, error of the contributing ones, share contributing.

    `means` are averages of `pseudo_label_counts` over batches. Averaging before the division weights each image equally, so
    that a batch without a confident image does not enter as an error of 0.
    """

    def percent(part: float, whole: float) -> float | None:
        return 100 * part / whole if whole else None

    return {
        "pseudo_label_error": percent(means["count/wrong"], means["count/known"]),
        "contributing_error": percent(means["count/wrong_used"], means["count/known_used"]),
        "mask_rate": 100 * means["count/used"],
    }
