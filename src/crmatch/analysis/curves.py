"""Analyses that need only the files of finished runs: finding runs, training curves, thresholds, spread over classes.

Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crmatch.errors import DataError, RequestError
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


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Directories of the finished runs at or below each of `paths`, in order and without duplicates.

    Runs that `--fresh` set aside are found only if they are named themselves.
    """
    found: dict[Path, None] = {}
    for path in paths:
        below = [path] if (path / "record.json").is_file() else finished_below(path, "**/record.json")
        if not below:
            raise DataError(f"there is no finished run in {path}.\nTrain first, or name the directory of a run.")
        found |= dict.fromkeys(below)
    return list(found)


def finished_below(path: Path, pattern: str) -> list[Path]:
    """Directories of the records that match `pattern`, without runs that `--fresh` set aside."""
    return sorted(file.parent for file in path.glob(pattern) if not RunDirectory(file.parent).is_aside)


def read_record(run: Path) -> RunRecord:
    """The record of a finished run."""
    record = RunDirectory(run).read_record()
    if record is None:
        raise DataError(f"{run} has no record.json: it is not a finished run.\nRun its command again to finish it.")
    return record


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
