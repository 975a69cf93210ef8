"""Records: one JSON per finished run, written once, and the directory each run lives in. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from crmatch.errors import DataError
from crmatch.spec.run_spec import RunSpec
from crmatch.strict_model import StrictModel

MEDIAN_OF = 20
HEADLINES = {"last": "final model", "median_last_20": f"median of the last {MEDIAN_OF} evaluations"}
"""In words, which error `spec.headline` selects."""


class Errors(StrictModel):
    """Test errors of one model in percent, by the rules that people report."""

    last: float
    median_last_20: float
    """Median of the last 20 evaluations (of all, where there were fewer)."""
    best_on_test: float
    """The lowest over all evaluations: chosen on the test set, never a headline."""

    @classmethod
    def from_curve(cls, errors: Sequence[float]) -> Self:
        """From the errors of all evaluations in order."""
        return cls(last=errors[-1], median_last_20=statistics.median(errors[-MEDIAN_OF:]), best_on_test=min(errors))


class RunRecord(StrictModel):
    """What a finished run leaves behind."""

    spec: RunSpec
    numerics: int
    crmatch_version: str
    evaluated: Literal["ema", "raw"]
    """Which model counts."""
    ema: Errors | None
    raw: Errors | None
    """None for both where there is no test set."""
    per_class_error: list[float | None]
    """None for a class without a test image."""
    confusion: list[list[int]]
    calibration_error: float | None
    class_names: list[str]
    labeled_images: int
    unlabeled_images: int
    test_images: int
    data_fingerprint: str
    steps: int
    images_seen: int
    """Images that went through the network in training."""
    seconds: float
    machine: dict[str, Any]
    final: dict[str, Any]
    """The last line of the curves."""
    policy: dict[str, list[list[float]]] | None = None
    """What a learning policy learned: operation -> the rates of each parameter's bins."""

    @property
    def error(self) -> float | None:
        """The headline: test error of the evaluated model by the spec's rule, in percent."""
        errors = self.ema if self.evaluated == "ema" else self.raw
        return None if errors is None else float(getattr(errors, self.spec.headline))


def parse_record(values: Any, path: Path) -> RunRecord:
    """The record in JSON values that were read from `path`."""
    try:
        return RunRecord.model_validate(values)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"{path} is no run record: {reason}.\nThe file is damaged; remove it to run again.") from error
