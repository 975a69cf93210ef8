from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import nn

from crmatch import evaluation
from crmatch.augment.batches import Normalizer
from crmatch.evaluation import measure, pseudo_label_counts, pseudo_label_quality
from crmatch.networks.network import Outputs
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


class MeanColor(nn.Module):
    """Logits and features are the mean of each channel; refuses training mode and batches above 3 images."""

    def forward(self, images: torch.Tensor) -> Outputs:
        assert not self.training
        assert len(images) <= 3
        return Outputs(images, images.mean(dim=(2, 3)), images.mean(dim=(2, 3)))


def test_predictions_are_made_in_batches_in_eval_mode_and_keep_the_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "BATCH", 3)
    images = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network: Any = MeanColor().train()
    probabilities, features = evaluation.predict(network, images, Normalizer((0.5,) * 3, (0.5,) * 3, torch.float64))
    assert network.training
    expected = images.double().mean(dim=(2, 3)) / 127.5 - 1
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(probabilities, expected.softmax(dim=1))


def test_last_median_and_best_are_told_apart() -> None:
    curve = [90.0, 1.0, *(float(value) for value in range(30, 50))]
    errors = Errors.from_curve(curve)
    assert (errors.last, errors.median_last_20, errors.best_on_test) == (49.0, 39.5, 1.0)
    assert Errors.from_curve([3.0, 5.0]).median_last_20 == 4.0
