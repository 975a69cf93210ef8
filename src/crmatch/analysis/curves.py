"""Analyses that need only the files of finished runs: finding them, training curves, thresholds, spread over classes.

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
"""The paper's three curves (spec 7.5): error of all pseudo-labels, error of those that count, share of those that count."""
Points = list[tuple[int, float]]


class Summary(NamedTuple):
    """Repeated measurements: mean, sample standard deviation (0 for one), and how many there were."""

    mean: float
    std: float
    n: int


def summarize(values: Sequence[float]) -> Summary:
    """Mean and spread of `values`."""
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Directories of finished runs at or below each of `paths`, each once, in order; those set aside only by their names."""
    found: dict[Path, None] = {}
    for path in paths:
        below = [path] if (path / "record.json").is_file() else finished_below(path, "**/record.json")
        if not below:
            raise DataError(f"there is no finished run in {path}.\nTrain first, or name the directory of a run.")
        found |= dict.fromkeys(below)
    return list(found)


def finished_below(path: Path, pattern: str) -> list[Path]:
    """Directories of the records that `pattern` finds, without runs that `--fresh` set aside."""
    return sorted(file.parent for file in path.glob(pattern) if not RunDirectory(file.parent).is_aside)


def read_record(run: Path) -> RunRecord:
    """The record of a finished run."""
    record = RunDirectory(run).read_record()
    if record is None:
        raise DataError(f"{run} has no record.json: it is no finished run.\nThe command that began it continues it.")
    return record


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> Points:
    """(step, value) of one curve; log points that say nothing are left out."""
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def pseudo_label_curves(run: Path) -> dict[str, Points]:
    """The paper's three curves of a run, in percent, as its metrics.jsonl has them; empty where it made no pseudo-labels."""
    lines = RunDirectory(run).read_metrics()
    curves = {key: curve(lines, key) for key in PSEUDO_LABEL_CURVES}
    return {key: points for key, points in curves.items() if points}


def threshold_curve(records: Sequence[RunRecord]) -> dict[float, Summary]:
    """Test error in percent by confidence threshold, over splits and seeds; other keys must be the same in all records."""
    errors: dict[float, list[float]] = {}
    first = records[0]
    for record in records:
        threshold = getattr(record.spec.method, "threshold", None)
        if threshold is None or record.error is None:
            missing = "test error" if threshold is not None else "threshold"
            raise RequestError(f"a {record.spec.method.name} run on {record.spec.setting} has no {missing}.\nLeave it out.")
        other = [key for key in differences(first.spec, record.spec) if key not in ("split", "seed", "method.threshold")]
        if other:
            raise RequestError(
                f"runs of a threshold curve may differ in threshold, split and seed only, found {', '.join(other[:3])}.\n"
                "Draw one curve for each."
            )
        errors.setdefault(threshold, []).append(record.error)
    return {threshold: summarize(errors[threshold]) for threshold in sorted(errors)}


def class_spread(per_class_error: Sequence[float | None]) -> float | None:
    """Standard deviation over classes of the per-class error, in percent points (spec 7.6); None without a test set.

    All classes are there, so it is that of a population: sqrt(mean((e_k - mean e)^2)).
    """
    known = [error for error in per_class_error if error is not None]
    return statistics.pstdev(known) if known else None
