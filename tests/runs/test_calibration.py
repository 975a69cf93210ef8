"""Confidences: the fitted temperature, the threshold for an error, and what the commands say about them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from conftest import Command, Trained
from crmatch.evaluation import measure
from crmatch.losses import sharpen
from crmatch.predict.model import load
from crmatch.runs.calibration import CERTAINTY, Calibration, calibrate, fit_temperature
from reference import calibration as slow


def too_confident(images: int, temperature: float = 2.0, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities p and classes drawn from p^(1/T), normalized: p is too confident for T above 1."""
    random = np.random.default_rng(images)
    probabilities = torch.from_numpy(random.dirichlet([0.3] * classes, images)).clamp_min(1e-9)
    honest = sharpen(probabilities, temperature).numpy()
    labels = [random.choice(classes, p=row / row.sum()) for row in honest]
    return probabilities, torch.tensor(labels)


@pytest.mark.parametrize("images", [12, 200])
def test_the_temperature_minimizes_the_loss_of_plain_loops(images: int) -> None:
    probabilities, labels = too_confident(images)
    rows, found = probabilities.tolist(), fit_temperature(probabilities, labels)
    grid = [found * factor for factor in (0.9, 0.98, 1.02, 1.1)]
    best = slow.temperature_loss(rows, labels.tolist(), found)
    assert all(best < slow.temperature_loss(rows, labels.tolist(), other) for other in grid)


def test_the_true_temperature_is_found_and_lowers_the_calibration_error() -> None:
    probabilities, labels = too_confident(3000)
    temperature = fit_temperature(*too_confident(2999))
    assert temperature == pytest.approx(2.0, rel=0.1)
    before, after = measure(probabilities, labels), measure(sharpen(probabilities, temperature), labels)
    assert after.error == before.error
    assert after.calibration_error < before.calibration_error / 3


def test_a_model_that_is_always_right_gets_no_extreme_temperature() -> None:
    assert 0.3 < fit_temperature(torch.tensor([[0.9, 0.1]] * 12), torch.zeros(12, dtype=torch.long)) < 1


@pytest.mark.parametrize("error", [0.02, 0.1, 0.3])
def test_the_threshold_for_an_error_equals_that_of_plain_loops(error: float) -> None:
    probabilities, labels = too_confident(150, 1.0)
    found = calibrate((probabilities, labels), None)
    assert found is not None
    confidence, predicted = sharpen(probabilities, found.temperature).max(dim=1)
    right = (predicted == labels).tolist()
    assert found.confidence_for(error) == slow.confidence_for(confidence.tolist(), right, error, CERTAINTY)
    level = found.confidence_for(error) or 0.995
    assert found.error_limit(0.9) == pytest.approx(
        slow.upper_limit(found.above(0.9)[0] - found.above(0.9)[1], found.above(0.9)[0], CERTAINTY)
    )
    assert found.lowest_limit <= found.error_limit(level)


def test_the_threshold_is_rarely_too_low() -> None:
    """In at most 20 % of the cases the true error of the answers is above the one that was asked for."""
    probabilities, labels = too_confident(20_000, 1.0)
    confidence, predicted = probabilities.max(dim=1)
    right, random = predicted == labels, np.random.default_rng(0)
    above = []
    for _ in range(60):
        rows = torch.from_numpy(random.integers(0, len(labels), 200))
        counts = [torch.bincount((confidence[part] * 100).long(), minlength=100) for part in (rows, rows[right[rows]])]
        answers = list(zip(*(part.tolist() for part in counts), strict=True))
        found = Calibration(temperature=1, fitted_on="test", fitted_images=200, measured_on="test", answers=answers)
        level = found.confidence_for(0.1)
        above.append(level is not None and bool((~right[confidence >= level]).double().mean() > 0.1))
    assert np.mean(above) < 0.3  # 20 % and three standard errors would be 35 %


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "a.png")
    return tmp_path / "a.png"


@pytest.mark.process
def test_predict_says_how_often_answers_were_right_on_the_test_set(crmatch: Command, trained: Trained, photo: Path) -> None:
    calibration = load(trained.run).calibration
    assert calibration is not None
    assert calibration.fitted_on == calibration.measured_on == "test"  # a network from scratch has no held-out labels
    count, right = calibration.above(0.4)
    outcome = crmatch("predict", trained.run, photo, "--abstain", "0.4")
    assert outcome.code == 0, outcome.err
    assert f"On the 18 test pictures, {right} of {count} answers of a confidence of 0.4 or more were right" in outcome.err
    assert "95 % interval" in outcome.err
    assert "fitted on the test set (18 images)" in (trained.run / "README.md").read_text()


@pytest.mark.process
def test_a_model_without_calibration_predicts_as_before(crmatch: Command, finished: Path, photo: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    temperature = config.pop("calibration")["temperature"]
    calibrated = load(finished).predict_probabilities([photo])
    (finished / "config.json").write_text(json.dumps(config))
    plain = load(finished).predict_probabilities([photo])
    assert torch.allclose(sharpen(plain, temperature), calibrated)
    outcome = crmatch("predict", finished, photo)
    assert outcome.code == 0
    assert "not calibrated" in outcome.err
    assert crmatch("predict", finished, photo, "--abstain-error", "5").code == 2


@pytest.mark.process
def test_an_error_that_the_pictures_cannot_vouch_for_is_refused_with_the_lowest_one(
    crmatch: Command, trained: Trained, photo: Path
) -> None:
    outcome = crmatch("predict", trained.run, photo, "--abstain-error", "1")
    assert outcome.code == 2
    lowest = outcome.err.split("--abstain-error ")[1].split(";")[0]
    assert int(lowest) >= 9  # none wrong of 18: at most 8.6 % by an 80 % limit
    outcome = crmatch("predict", trained.run, photo, "--abstain-error", lowest)
    assert outcome.code == 0, outcome.err
    assert f"at most {lowest} % of such answers are wrong (with 80 % certainty), judged by the 18 test pictures" in outcome.err
    assert crmatch("predict", trained.run, photo, "--abstain-error", "5", "--abstain", "0.5").code == 2
    assert "not a percentage" in crmatch("predict", trained.run, photo, "--abstain-error=-3").err


@pytest.mark.parametrize("first", [(9, 10), (3, -1), (10**30, 5)])
def test_a_file_with_impossible_counts_is_refused(first: tuple[int, int]) -> None:
    with pytest.raises(ValidationError, match="impossible number"):
        Calibration(temperature=1, fitted_on="test", fitted_images=9, measured_on="test", answers=[first, *[(0, 0)] * 99])
