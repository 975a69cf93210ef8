"""Everything the page shows of one run, as plain values: the template only draws them.

The report: one self-contained HTML page about one run or many. It asks for nothing from the network and has no script.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

import crmatch
from crmatch.analysis.curves import class_spread, curve, find_runs, finished_below, read_record
from crmatch.analysis.finished_run import Bin
from crmatch.atomic_files import write_file
from crmatch.data.settings import Setting
from crmatch.errors import CRMatchError, RequestError
from crmatch.methods import METHODS
from crmatch.report.charts import COLORS, Chart, Series, line_chart
from crmatch.report.pictures import ImageViews, Thumbnail, confusion_picture, image_views
from crmatch.runs.cost import duration
from crmatch.runs.directory import RunDirectory
from crmatch.runs.record import RunRecord
from crmatch.spec.recipes import changed_keys, recipe, setting_of, train_command
from crmatch.spec.run_spec import RunSpec, differences, flatten

LARGEST_MATRIX = 25
"""Classes up to which the confusion matrix shows its numbers."""
TOP_CONFUSIONS = 8
TERMS = {
    "supervised": "labeled images",
    "pseudo_label": "pseudo-labels",
    "feature_distance": "feature distance",
    "rotation": "rotation",
}


class Baseline(NamedTuple):
    """Supervised-only on the same labels: its record, where it lies, and what else differs from the run beside it."""

    record: RunRecord
    path: Path
    differs: str


class Cell(NamedTuple):
    """A cell of the confusion matrix: images, and their share of the row's, 0..1."""

    images: int
    share: float


class ClassError(NamedTuple):
    """Error of one class in percent, None without a test image; beside it that of the baseline."""

    name: str
    images: int
    error: float | None
    baseline: float | None


class SpecRow(NamedTuple):
    """A key of the spec with its value, and the paper's recipe's where that differs."""

    section: str
    name: str
    value: str
    paper: str | None


class RunView(NamedTuple):
    """What the page shows of one run."""

    anchor: str
    path: str
    title: str
    subtitle: str
    record: RunRecord
    error: float | None
    baseline: Baseline | None
    facts: list[tuple[str, str]]
    charts: list[Chart]
    confusion: list[list[Cell]]
    confusion_picture: str | None
    confusions: list[tuple[str, str, int]]
    classes: list[ClassError]
    spread: float | None
    mistakes: list[Thumbnail]
    uncertain: list[Thumbnail]
    uncertain_source: str
    bins: list[Bin]
    missing: str | None
    spec: list[SpecRow]
    command: str | None
    versions: list[tuple[str, str]]
    errors: Sequence[tuple[int, float]]


def view_run(path: Path, record: RunRecord, baseline: Baseline | None, number: int, data_dir: Path | None) -> RunView:
    """Everything about the run in `path`; its data and model are read for pictures and calibration where they are there."""
    lines = RunDirectory(path).read_metrics()
    images, missing = ImageViews([], [], "", []), None
    try:
        images = image_views(path, data_dir)
    except CRMatchError as error:
        missing = str(error).splitlines()[0]
    spec, names, setting = record.spec, record.class_names, _setting(record.spec, data_dir)
    large = len(names) > LARGEST_MATRIX
    shares = [[Cell(count, count / max(sum(row), 1)) for count in row] for row in record.confusion]
    return RunView(
        anchor=f"run-{number}",
        path=str(path),
        title=f"{METHODS[spec.method.name].title} on {spec.setting}",
        subtitle=", ".join([f"split {spec.split}, seed {spec.seed}, recipe {spec.recipe}", *_assignments(spec, setting)]),
        record=record,
        error=record.error,
        baseline=baseline,
        facts=_facts(record),
        charts=_charts(record, lines, baseline),
        confusion=[] if large else shares,
        confusion_picture=confusion_picture([[cell.share for cell in row] for row in shares]) if large and shares else None,
        confusions=_confusions(record),
        classes=_classes(record, baseline),
        spread=class_spread(record.per_class_error),
        mistakes=images.mistakes,
        uncertain=images.uncertain,
        uncertain_source=images.uncertain_source,
        bins=images.bins,
        missing=missing,
        spec=spec_rows(spec, setting),
        command=train_command(spec, setting) if setting else None,
        versions=_versions(record),
        errors=curve(lines, f"error/{record.evaluated}"),
    )


def spec_rows(spec: RunSpec, setting: Setting | None) -> list[SpecRow]:
    """Every key of a spec; where the paper's recipe for the same method and setting says otherwise, that beside it."""
    changed: dict[str, tuple[Any, Any]] = {}
    if setting is not None:
        changed = differences(spec, recipe(setting, spec.method.name, "paper"))
    same = ("setting", "split", "seed", "recipe")
    rows = []
    for key, value in flatten(spec.to_json()):
        section, _, name = key.partition(".") if "." in key else ("run", "", key)
        rows.append(
            SpecRow(section, name, _value(value), _value(changed[key][1]) if key in changed and key not in same else None)
        )
    return sorted(rows, key=lambda row: row.section != "run")


def _assignments(spec: RunSpec, setting: Setting | None) -> list[str]:
    """`key=value` of every key that was changed against the run's recipe; none where its data are not here any more."""
    return [f"{key}={_value(value)}" for key, value in changed_keys(spec, setting).items()] if setting else []


def _setting(spec: RunSpec, data_dir: Path | None) -> Setting | None:
    """The setting of a spec; None where its data are not here any more."""
    try:
        return setting_of(spec, data_dir)
    except CRMatchError:
        return None


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    facts = [
        ("labeled images", f"{record.labeled_images:,}"),
        ("unlabeled images", f"{record.unlabeled_images:,}"),
        ("test images", f"{record.test_images:,}"),
        ("classes", f"{len(record.class_names):,}"),
        ("steps", f"{record.steps:,}"),
        ("training time", duration(record.seconds)),
    ]
    if record.calibration_error is not None:
        facts.append(("calibration error", f"{record.calibration_error:.2f} points"))
    return facts


def _charts(record: RunRecord, lines: list[dict[str, Any]], baseline: Baseline | None) -> list[Chart]:
    """Test error, quality of pseudo-labels, loss terms: as far as the run has them."""
    names = {"ema": "moving average", "raw": "raw weights"}
    errors = [Series(label, curve(lines, f"error/{key}"), place) for place, (key, label) in enumerate(names.items(), 1)]
    if baseline and baseline.record.error is not None and any(one.points for one in errors):
        end = max(step for one in errors for step, _ in one.points)
        errors.append(Series("supervised only", [(0, baseline.record.error), (end, baseline.record.error)], 3, dashed=True))
    quality = [
        Series("error of all pseudo-labels", curve(lines, "pseudo_label_error"), 2),
        Series("error of those that count", curve(lines, "contributing_error"), 4),
        Series("share of images that count", curve(lines, "mask_rate"), 1, dashed=True),
    ]
    last = lines[-1] if lines else {}
    terms = [key.removeprefix("loss/") for key in last if key.startswith("loss/") and key != "loss/total"]
    losses = [
        Series(TERMS.get(term, term.replace("_", " ")), curve(lines, f"loss/{term}"), place)
        for place, term in enumerate(terms[:8], 1)
    ]
    charts = [
        line_chart("Test error", errors, note=f"{record.test_images:,} test images"),
        line_chart("Pseudo-label quality", quality, note="unlabeled batches, against true classes; for curves only", top=100),
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


def _classes(record: RunRecord, baseline: Baseline | None) -> list[ClassError]:
    """Errors by class, the highest first."""
    beside = baseline.record.per_class_error if baseline else [None] * len(record.per_class_error)
    rows = (
        [
            ClassError(name, sum(images), error, other)
            for name, images, error, other in zip(
                record.class_names, record.confusion, record.per_class_error, beside, strict=True
            )
        ]
        if record.confusion
        else []
    )
    return sorted(rows, key=lambda row: -1.0 if row.error is None else row.error, reverse=True)


def _versions(record: RunRecord) -> list[tuple[str, str]]:
    machine = record.machine
    rows = [("crmatch", f"{record.crmatch_version}, numerics {record.numerics}")]
    if machine.get("commit"):
        rows.append(("commit", str(machine["commit"])))
    rows += [(str(name), str(version)) for name, version in machine.get("versions", {}).items()]
    return [*rows, ("device", f"{machine.get('device')}, {machine.get('processor')}, threads: {machine.get('threads')}")]


Found = dict[Path, RunRecord]


def write_report(runs: Sequence[Path], out: Path, command: str, data_dir: Path | None = None) -> list[Path]:
    """Write the page about all finished runs at or below `runs` to `out`; returns the runs' directories."""
    if out.is_dir():
        raise RequestError(f"--out {out} is a directory.\nName the page: --out {out / 'report.html'}")
    found = {path: read_record(path) for path in find_runs(runs)}
    views = [
        view_run(path, record, find_baseline(path, record, found), number, data_dir)
        for number, (path, record) in enumerate(found.items(), start=1)
    ]
    write_file(out, render(views, command).encode())
    return list(found)


def render(views: Sequence[RunView], command: str) -> str:
    """The page as text; whatever names contain is escaped."""
    environment = Environment(
        loader=PackageLoader("crmatch.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    title = views[0].title if len(views) == 1 else f"{len(views)} runs"
    return environment.get_template("report.html").render(
        title=title, views=views, comparison=_comparison(views), command=command, version=crmatch.__version__
    )


def find_baseline(path: Path, record: RunRecord, found: Found) -> Baseline | None:
    """Supervised-only on the same labels, among the page's runs or beside the run's directory: the one most like it."""
    if record.spec.method.name == "supervised":
        return None
    beside = finished_below(path.parent.parent, "supervised*/*/record.json")
    candidates = found | {other: read_record(other) for other in beside if other not in found}
    fitting = []
    for other, candidate in candidates.items():
        same = all(
            getattr(candidate, key) == getattr(record, key) for key in ("labeled_images", "data_fingerprint", "test_images")
        )
        setting = (candidate.spec.setting, candidate.spec.split) == (record.spec.setting, record.spec.split)
        if candidate.spec.method.name == "supervised" and same and setting:
            changed = [key for key in differences(candidate.spec, record.spec) if not key.startswith("method.")]
            shown = dict(_shared_differences(candidate, record))
            fitting.append((len(changed), other, candidate, ", ".join(f"{key} {value}" for key, value in shown.items())))
    if not fitting:
        return None
    _, other, candidate, differs = min(fitting, key=lambda one: one[0])
    return Baseline(candidate, other, differs)


def _shared_differences(candidate: RunRecord, record: RunRecord) -> list[tuple[str, object]]:
    """What a reader should know where the two are not of one kind: recipe, seed, steps, network."""
    keys = ("recipe", "seed", "plan.steps", "network.filters", "data.image_size")
    changed = differences(candidate.spec, record.spec)
    return [(key, changed[key][0]) for key in keys if key in changed]


def _comparison(views: Sequence[RunView]) -> Chart | None:
    """Test error of all runs over their steps, where they can be told apart."""
    if not 1 < len(views) <= COLORS:
        return None
    series = [Series(f"{view.title}, {view.subtitle}", list(view.errors), place) for place, view in enumerate(views, start=1)]
    return line_chart("Test error", series)
