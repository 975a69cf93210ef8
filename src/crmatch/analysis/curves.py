"""Analyses that need only the files of finished runs: training curves, thresholds, spread over classes.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crmatch.errors import RequestError
from crmatch.runs.directory import RunDirectory
from crmatch.runs.record import RunRecord
from crmatch.spec.run_spec import differences

PSEUDO_LABEL_CURVES = ("pseudo_label_error", "contributing_error", "mask_rate")
"""The paper's three curves: error of all pseudo-labels, error of the contributing ones, and share of the contributing ones."""
Points = list[tuple[int, float]]


class Summary(NamedTuple):
    """Mean and sample standard deviation (0 for one value) of n measurements."""

    mean: float
    std: float
    n: int


def summarize(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and number of `values`."""
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> Points:
    """(step, value) of one curve, at the log points that have a value."""
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def pseudo_label_curves(run: Path) -> dict[str, Points]:
    """The paper's three curves of a run in percent; empty if its method makes no pseudo-labels."""
    lines = RunDirectory(run).read_metrics()
    curves = {key: curve(lines, key) for key in PSEUDO_LABEL_CURVES}
    return {key: points for key, points in curves.items() if points}


def threshold_curve(records: Sequence[RunRecord]) -> dict[float, Summary]:
    """Test error in percent by confidence threshold, over splits and seeds; the records must agree in all other keys."""
    errors: dict[float, list[float]] = {}
    for record in records:
        threshold = getattr(record.spec.method, "threshold", None)
        if threshold is None or record.error is None:
            missing = "threshold" if threshold is None else "test error"
            raise RequestError(f"a {record.spec.method.name} run on {record.spec.setting} has no {missing}.\nLeave it out.")
        other = differences(records[0].spec, record.spec).keys() - {"split", "seed", "method.threshold"}
        if other:
            raise RequestError(
                "runs of a threshold curve may differ in threshold, split and seed only, "
                f"found {', '.join(sorted(other)[:3])}.\nDraw one curve for each."
            )
        errors.setdefault(threshold, []).append(record.error)
    return {threshold: summarize(errors[threshold]) for threshold in sorted(errors)}


def class_spread(per_class_error: Sequence[float | None]) -> float | None:
    """Population standard deviation of the per-class errors, in percentage points; None without a test set."""
    known = [error for error in per_class_error if error is not None]
    return statistics.pstdev(known) if known else None
