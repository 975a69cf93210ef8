"""Records: one JSON file per finished run, written once. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from crmatch.errors import DataError
from crmatch.spec.run_spec import STORED, RunSpec
from crmatch.strict_model import StrictModel

Percentage = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=0, le=10**15)]
MEDIAN_OF = 20
HEADLINES = {"last": "final model", "median_last_20": f"median of the last {MEDIAN_OF} evaluations"}
"""In words, which error `spec.headline` selects."""


class Errors(StrictModel):
    """Test errors of one model in percent."""

    last: Percentage
    median_last_20: Percentage  # of the last 20 evaluations (of all, if there were fewer)
    best_on_test: Percentage  # the lowest of all evaluations: selected on the test set, so no table ever reports it

    @classmethod
    def from_curve(cls, errors: Sequence[float]) -> Self:
        """From the errors of all evaluations in order."""
        return cls(last=errors[-1], median_last_20=statistics.median(errors[-MEDIAN_OF:]), best_on_test=min(errors))


class CrossValidation(StrictModel):
    """Cross-validation over the labels: the error in percent, and how many labels were held out, each one once."""

    error: Percentage
    labels: Count


class RunRecord(StrictModel):
    """Results of a finished run, with its spec and what it ran on."""

    spec: RunSpec
    numerics: int
    crmatch_version: str
    evaluated: Literal["ema", "raw"]  # which weights are reported
    ema: Errors | None  # None without a test set, as `raw`
    raw: Errors | None
    per_class_error: list[Percentage | None]  # None for a class without test images
    confusion: list[list[Count]]
    calibration_error: Percentage | None  # of the confidences as the model gives them, corrected by its temperature
    class_names: list[str]
    labeled_images: Count
    unlabeled_images: Count
    test_images: Count
    data_fingerprint: str
    steps: Count
    images_seen: Count  # that passed through the network in training
    seconds: float
    machine: dict[str, Any]
    final: dict[str, Any]  # the last line of the curves
    pseudo_labels_used: bool | None = None  # whether any counted in the loss; None: there were none, or an older record
    cross_validation: CrossValidation | None = None  # only for heads on frozen backbones
    policy: dict[str, list[list[float]]] | None = None  # learned by CTAugment: operation -> weights of each parameter's bins

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        classes, shapes = len(self.class_names), {len(row) for row in self.confusion}
        if len(self.per_class_error) != len(self.confusion) or (shapes and {len(self.confusion), *shapes} != {classes}):
            raise ValueError(f"its errors and confusions are not those of {classes} classes")
        if not isinstance(self.machine.get("versions", {}), dict):
            raise ValueError("its versions have no names")
        return self

    @property
    def error(self) -> float | None:
        """The reported test error in percent: of the evaluated weights, by the rule that the spec names."""
        errors = self.ema if self.evaluated == "ema" else self.raw
        return None if errors is None else float(getattr(errors, self.spec.headline))


def describe_interval(error: float, images: int) -> str:
    """The 95 % interval of an error in percent, in words.

    Wilson's interval of a share p among n images: (p + z^2 / 2n ± z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n).
    """
    share, z = round(error / 100 * images) / images, statistics.NormalDist().inv_cdf(0.975)
    center, width = share + z**2 / (2 * images), z * math.sqrt(share * (1 - share) / images + z**2 / (4 * images**2))
    low, high = ((center + side * width) / (1 + z**2 / images) for side in (-1, 1))
    return f"95 % interval {100 * max(0.0, low):.1f}–{100 * high:.1f} %"


def describe_error(error: float, images: int) -> str:
    """An error in percent with its 95 % interval and the accuracy, in words."""
    return f"{error:.2f} % ({describe_interval(error, images)}), accuracy {100 - error:.2f} %"


def parse_record(values: Any, path: Path) -> RunRecord:
    """The record in JSON values read from `path`."""
    advice = "It is damaged or of another version of crmatch; move it away to train the run again."
    try:
        record = RunRecord.model_validate(values, context=STORED)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"{path} is not a run record: {reason}.\n{advice}") from error
    tested = {one is not None for one in (record.ema, record.raw, record.calibration_error)} | {record.test_images > 0}
    if len(tested) > 1 or (record.cross_validation and not record.cross_validation.labels):
        raise DataError(f"{path} is not a run record: it has only a part of the results.\n{advice}")
    return record
