from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from crmatch.evaluation import measure, pseudo_label_counts, pseudo_label_quality
from crmatch.runs.record import Errors


def test_error_and_confusion_equal_scikit_learns() -> None:
    random = np.random.default_rng(0)
    labels, scores = random.integers(0, 5, 400), random.random((400, 5))
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    quality = measure(torch.from_numpy(probabilities), torch.from_numpy(labels))
    expected = confusion_matrix(labels, probabilities.argmax(axis=1))
    assert quality.confusion == expected.tolist()
    assert quality.error == 100 * (400 - expected.trace()) / 400
    assert quality.per_class == pytest.approx(100 * (1 - expected.diagonal() / expected.sum(axis=1)))


def test_calibration_error_equals_a_loop_over_bins() -> None:
    random = np.random.default_rng(1)
    probabilities = random.dirichlet([0.5] * 4, 500)
    labels = random.integers(0, 4, 500)
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    expected = 0.0
    for low in range(15):
        inside = (np.minimum((confidence * 15).astype(int), 14)) == low
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    quality = measure(torch.from_numpy(probabilities), torch.from_numpy(labels))
    assert quality.calibration_error == pytest.approx(100 * expected)


def test_a_class_without_a_test_image_has_no_error() -> None:
    quality = measure(torch.eye(3)[[0, 1]], torch.tensor([0, 0]))
    assert quality.per_class == [50.0, None, None]


def test_the_three_curves_weigh_by_images_and_leave_unknown_classes_out() -> None:
    batches = [
        (torch.tensor([0, 1, 2, 2]), torch.tensor([True, True, False, False]), torch.tensor([0, 2, 2, -1])),
        (torch.tensor([0, 1, 2, 2]), torch.tensor([False, False, False, False]), torch.tensor([0, 0, 0, 0])),
    ]
    counts = [pseudo_label_counts(*batch) for batch in batches]
    means = {name: float(torch.stack([count[name] for count in counts]).mean()) for name in counts[0]}
    quality = pseudo_label_quality(means)
    assert quality["pseudo_label_error"] == pytest.approx(100 * 4 / 7)
    assert quality["contributing_error"] == pytest.approx(50.0)
    assert quality["mask_rate"] == pytest.approx(25.0)


def test_no_contributing_image_says_nothing_instead_of_all_right() -> None:
    counts = pseudo_label_counts(torch.tensor([0]), torch.tensor([False]), torch.tensor([1]))
    quality = pseudo_label_quality({name: value.item() for name, value in counts.items()})
    assert quality["contributing_error"] is None
    assert quality["pseudo_label_error"] == 100.0


def test_last_median_and_best_are_told_apart() -> None:
    curve = [90.0, 1.0, *(float(value) for value in range(30, 50))]
    errors = Errors.from_curve(curve)
    assert (errors.last, errors.median_last_20, errors.best_on_test) == (49.0, 39.5, 1.0)
    assert Errors.from_curve([3.0, 5.0]).median_last_20 == 4.0
