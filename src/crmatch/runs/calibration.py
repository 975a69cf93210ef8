"""Confidences that mean something: a temperature for the probabilities of a model, and how often its answers were right."""

from __future__ import annotations

import math
from typing import Literal

import torch.nn.functional as F  # noqa: N812
from pydantic import Field, field_validator
from torch import Tensor

from crmatch.evaluation import reliability
from crmatch.losses import sharpen
from crmatch.strict_model import StrictModel

LEVELS = 100
"""Answers are counted in so many equal bins of confidence."""
MOST_ANSWERS = 10**9  # per bin; more are a damaged file
CERTAINTY = 0.8
"""Probability with which the error of the answers above a chosen confidence is as low as asked for."""
Source = Literal["labels", "test"]
"""Labels that were held out in cross-validation, or the test set."""
Predictions = tuple[Tensor, Tensor]
"""Probabilities (N, K) and the true classes (N,) of images that were not trained on."""


class Calibration(StrictModel):
    """How the confidences of a model are corrected, and how often its answers were right."""

    temperature: float = Field(gt=0)  # T: probabilities p become p^(1/T), normalized
    fitted_on: Source
    fitted_images: int
    measured_on: Source
    answers: list[tuple[int, int]] = Field(min_length=LEVELS, max_length=LEVELS)
    """By hundredths of confidence, the number of answers and of right answers."""

    @field_validator("answers")
    @classmethod
    def _check_answers(cls, answers: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if not all(0 <= right <= count <= MOST_ANSWERS for count, right in answers):
            raise ValueError("has more right answers than answers, or an impossible number of them")
        return answers

    def above(self, confidence: float) -> tuple[int, int]:
        """Number of answers of at least this confidence (rounded up to hundredths), and of right ones among them."""
        bins = self.answers[math.ceil(round(confidence * LEVELS, 6)) :]
        return sum(count for count, _ in bins), sum(right for _, right in bins)

    def confidence_for(self, error: float) -> float | None:
        """The lowest confidence above which at most this share of the answers is wrong; None if no confidence is enough.

        Judged by the upper limit of an 80 % interval (one-sided, Clopper-Pearson) of the error.
        """
        return next((level / LEVELS for level in range(LEVELS) if self.error_limit(level / LEVELS) <= error), None)

    def error_limit(self, confidence: float) -> float:
        """The upper limit of the error of the answers of at least this confidence; 1 if there are none."""
        from scipy.special import betaincinv

        count, right = self.above(confidence)
        return float(betaincinv(count - right + 1, right, CERTAINTY)) if right else 1.0

    @property
    def lowest_limit(self) -> float:
        """The lowest error for which `confidence_for` finds a confidence."""
        return min(self.error_limit(level / LEVELS) for level in range(LEVELS))

    def describe_pictures(self) -> str:
        """On which pictures the answers were counted, in words."""
        count, _ = self.above(0.0)
        if self.measured_on == "test":
            return f"the {count:,} test pictures"
        return f"{count:,} labeled pictures, each held out once (cross-validation, an estimate)"

    def describe_temperature(self) -> str:
        """Where the temperature comes from, in words."""
        where = "the test set" if self.fitted_on == "test" else "labels held out in cross-validation"
        return f"temperature {self.temperature:.2f}, fitted on {where} ({self.fitted_images:,} images)"


def calibrate(test: Predictions | None, held_out: Predictions | None) -> Calibration | None:
    """Fit a temperature on held-out labels, or on the test set if there are none, and count right answers on the test set.

    Without a test set the answers are counted on the held-out labels. None if there is neither.
    """
    fitted, measured = held_out or test, test or held_out
    if fitted is None or measured is None:
        return None
    temperature = fit_temperature(*fitted)
    bins = reliability(sharpen(measured[0], temperature), measured[1], LEVELS)
    return Calibration(
        temperature=temperature,
        fitted_on="labels" if held_out else "test",
        fitted_images=len(fitted[1]),
        measured_on="test" if test else "labels",
        answers=[(one.images, round(one.accuracy * one.images)) for one in bins],
    )


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """The T that minimizes (log T)^2 / 2 - sum_i log q_i(y_i), where q_i is p_i^(1/T), normalized.

    The first term, a standard normal prior of log T, keeps T away from 0 if every answer is right.
    """
    from scipy.optimize import minimize_scalar

    logits = probabilities.double().clamp_min(1e-30).log()

    def loss(log_temperature: float) -> float:
        surprise = F.cross_entropy(logits / math.exp(log_temperature), labels, reduction="sum")
        return log_temperature**2 / 2 + float(surprise)

    return round(math.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x), 4)
