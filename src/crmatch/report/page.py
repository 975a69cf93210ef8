"""The report: one self-contained HTML page about one or more runs. It loads nothing from the network and has no script.

`view_run` collects everything the page shows about a run as plain values; the template `report.html` only lays them out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import crmatch
from crmatch.analysis.curves import class_spread, curve
from crmatch.atomic_files import write_file
from crmatch.data.folder.workers import Progress
from crmatch.data.settings import Setting
from crmatch.errors import CRMatchError, RequestError
from crmatch.methods import kind_of, title_of
from crmatch.report.charts import COLORS, Chart, Series, line_chart
from crmatch.report.pictures import confusion_picture, image_views
from crmatch.report.rendering import render
from crmatch.runs.cost import duration
from crmatch.runs.directory import RunDirectory, changed_keys, train_command
from crmatch.runs.finished import find_runs, finished_below, read_record, short_names
from crmatch.runs.record import HEADLINES, RunRecord, describe_interval
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, differences, flatten

LARGEST_MATRIX = 25
"""Largest number of classes whose confusion matrix is shown with numbers."""
TOP_CONFUSIONS = 8
SHOWN_DIFFERENCES = ("recipe", "seed", "plan.steps", "network.filters", "data.image_size")
"""Keys in which a baseline may differ and whose values the page then shows."""
TERMS = {
    "supervised": "labeled images",
    "pseudo_label": "pseudo-labels",
    "feature_distance": "feature distance",
    "rotation": "rotation",
}


class Baseline(NamedTuple):
    """A supervised-only run on the same labels: its record, its directory, and other differences from the run."""

    record: RunRecord
    path: Path
    differs: str


def write_report(
    runs: Sequence[Path], out: Path, command: str, workspace: Workspace, progress: Progress | None = None
) -> list[Path]:
    """Write the page about all finished runs at or below `runs` to `out`; returns the runs' directories."""
    if out.is_dir():
        raise RequestError(f"--out {out} is a directory.\nName the page: --out {out / 'report.html'}")
    found = {path: read_record(path) for path in find_runs(runs)}
    names = short_names(list(found))
    views = []
    for number, (path, record) in enumerate(found.items(), start=1):
        if progress:
            progress(number - 1, len(found))
        view = view_run(path, record, find_baseline(path, record, found), workspace)
        views.append(view | {"anchor": f"run-{number}", "name": names[path]})
    if progress:
        progress(len(found), len(found))
    title = views[0]["title"] if len(views) == 1 else f"{len(views)} runs"
    values = {"title": title, "views": views, "comparison": _comparison(views), "command": command}
    write_file(out, render("report.html", **values, version=crmatch.__version__))
    return list(found)


def view_run(path: Path, record: RunRecord, baseline: Baseline | None, workspace: Workspace) -> dict[str, Any]:
    """What the page shows about the run in `path`; pictures and calibration only if its data and model are there."""
    lines = RunDirectory(path).read_metrics()
    spec, missing = record.spec, None
    images: dict[str, Any] = {"mistakes": [], "uncertain": [], "bins": []}
    try:
        images = image_views(path, workspace)
    except CRMatchError as error:
        missing = str(error).splitlines()[0]
    setting: Setting | None = None
    with contextlib.suppress(CRMatchError):  # its data is gone
        setting = workspace.setting_of(spec)
    changes = [f"{key}={_text(value)}" for key, value in changed_keys(spec, setting).items()] if setting else []
    large = len(record.class_names) > LARGEST_MATRIX
    estimate = record.cross_validation if record.error is None else None
    shown_error, measured = (estimate.error, estimate.labels) if estimate else (record.error, record.test_images)
    shares = [[count / max(sum(row), 1) for count in row] for row in record.confusion]
    return {
        "path": str(path),
        "title": f"{title_of(spec.method)} on {spec.setting}",
        "subtitle": ", ".join([f"split {spec.split}, seed {spec.seed}, recipe {spec.recipe}", *changes]),
        "record": record,
        "rule": HEADLINES[spec.headline],
        "error": shown_error,
        "estimated_on": estimate and estimate.labels,
        "interval": None if shown_error is None else describe_interval(shown_error, measured),
        "baseline": baseline,
        "facts": _facts(record),
        "charts": _charts(record, lines, baseline),
        "confusion": [] if large else [list(zip(*rows, strict=True)) for rows in zip(record.confusion, shares, strict=True)],
        "confusion_picture": confusion_picture(shares) if large and shares else None,
        "confusions": _confusions(record),
        "classes": _classes(record, baseline),
        "spread": class_spread(record.per_class_error),
        **images,
        "missing": missing,
        "spec": spec_rows(spec, setting),
        "command": train_command(spec, setting) if setting else None,
        "versions": _versions(record),
        "errors": curve(lines, f"error/{record.evaluated}"),
    }


def find_baseline(path: Path, record: RunRecord, found: Mapping[Path, RunRecord]) -> Baseline | None:
    """The most similar supervised-only run on the same labels, among `found` and in the directory next to the run's."""
    if record.spec.method.name == "supervised":
        return None
    beside = finished_below(path.parent.parent, "supervised*/*/record.json")
    candidates = {**found, **{other: read_record(other) for other in beside if other not in found}}

    def data_of(one: RunRecord) -> tuple[object, ...]:
        return one.spec.setting, one.spec.split, one.labeled_images, one.data_fingerprint, one.test_images

    best: tuple[int, Baseline] | None = None
    for other, candidate in candidates.items():
        if candidate.spec.method.name == "supervised" and data_of(candidate) == data_of(record):
            changed = {key: old for key, (old, _) in differences(candidate.spec, record.spec).items()}
            distance = sum(not key.startswith("method.") for key in changed)
            shown = [f"{key} {changed[key]}" for key in SHOWN_DIFFERENCES if key in changed]
            if best is None or distance < best[0]:
                best = distance, Baseline(candidate, other, ", ".join(shown))
    return best[1] if best else None


def spec_rows(spec: RunSpec, setting: Setting | None) -> list[dict[str, Any]]:
    """Every key of a spec with its value, and the value of the paper's recipe for the same setting if that differs."""
    paper = differences(spec, recipe(setting, kind_of(spec.method), "paper")) if setting else {}
    for key in ("setting", "split", "seed", "recipe"):  # these are no choices of the recipe
        paper.pop(key, None)
    rows: list[dict[str, Any]] = []
    for key, value in flatten(spec.to_json()):
        section, _, name = key.partition(".") if "." in key else ("run", "", key)
        of_paper = _text(paper[key][1]) if key in paper else None
        rows.append({"section": section, "name": name, "value": _text(value), "paper": of_paper})
    return sorted(rows, key=lambda row: row["section"] != "run")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    counts = {
        "labeled images": record.labeled_images,
        "unlabeled images": record.unlabeled_images,
        "test images": record.test_images,
        "classes": len(record.class_names),
        "steps": record.steps,
    }
    facts = [*((name, f"{count:,}") for name, count in counts.items()), ("training time", duration(record.seconds))]
    calibration = record.calibration_error
    return facts if calibration is None else [*facts, ("calibration error", f"{calibration:.2f} points")]


def _charts(record: RunRecord, lines: list[dict[str, Any]], baseline: Baseline | None) -> list[Chart]:
    """Charts of test error, pseudo-label quality and loss terms, as far as the run has them."""
    names = {"ema": "moving average", "raw": "raw weights"}
    errors = [Series(label, curve(lines, f"error/{key}"), place) for place, (key, label) in enumerate(names.items(), 1)]
    if baseline and baseline.record.error is not None and any(one.points for one in errors):
        end = max(step for one in errors for step, _ in one.points)
        errors.append(Series("supervised only", [(0, baseline.record.error), (end, baseline.record.error)], 3, dashed=True))
    quality = [
        Series("error of all pseudo-labels", curve(lines, "pseudo_label_error"), 2),
        Series("error of contributing images", curve(lines, "contributing_error"), 4),
        Series("share of contributing images", curve(lines, "mask_rate"), 1, dashed=True),
    ]
    is_known = any(one.points for one in quality[:2])  # nobody knows the classes of a folder's unlabeled pictures
    used = ("Pseudo-label quality", "on unlabeled batches; only this chart uses true classes")
    used = used if is_known else ("Pseudo-labels used", "of the unlabeled pictures in each step")
    last = lines[-1] if lines else {}
    terms = [key.removeprefix("loss/") for key in last if key.startswith("loss/") and key != "loss/total"]
    losses = [
        Series(TERMS.get(term, term.replace("_", " ")), curve(lines, f"loss/{term}"), place)
        for place, term in enumerate(terms[:COLORS], 1)
    ]
    charts = [
        line_chart("Test error", errors, note=f"{record.test_images:,} test images"),
        line_chart(used[0], quality, note=used[1], top=100),
        line_chart("Loss terms", losses, unit="", note="before their weights"),
    ]
    return [chart for chart in charts if chart]


def _confusions(record: RunRecord) -> list[tuple[str, str, int]]:
    """The most frequent confusions: true class, predicted class, images."""
    names = record.class_names
    cells = [
        (names[true], names[predicted], images)
        for true, row in enumerate(record.confusion)
        for predicted, images in enumerate(row)
        if true != predicted and images
    ]
    return sorted(cells, key=lambda cell: -cell[2])[:TOP_CONFUSIONS]


def _classes(record: RunRecord, baseline: Baseline | None) -> list[dict[str, Any]]:
    """Errors by class in percent (None without test images), the highest first; empty without a test set."""
    if not record.confusion:
        return []
    beside = baseline.record.per_class_error if baseline else [None] * len(record.class_names)
    rows: list[dict[str, Any]] = [
        {"name": name, "images": sum(images), "error": error, "baseline": other}
        for name, images, error, other in zip(record.class_names, record.confusion, record.per_class_error, beside, strict=True)
    ]
    return sorted(rows, key=lambda row: -1.0 if row["error"] is None else row["error"], reverse=True)


def _versions(record: RunRecord) -> list[tuple[str, str]]:
    machine = record.machine
    rows = [("crmatch", f"{record.crmatch_version}, numerics {record.numerics}")]
    if machine.get("commit"):
        rows.append(("commit", str(machine["commit"])))
    rows += [(str(name), str(version)) for name, version in machine.get("versions", {}).items()]
    return [*rows, ("device", f"{machine.get('device')}, {machine.get('processor')}, threads: {machine.get('threads')}")]


def _comparison(views: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Test errors of all runs over their steps, unless there are more runs than colors."""
    if not 1 < len(views) <= COLORS:
        return None
    series = [Series(one["name"], one["errors"], place) for place, one in enumerate(views, start=1)]
    return line_chart("Test error", series)
