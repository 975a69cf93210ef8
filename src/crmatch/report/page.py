"""The report: one self-contained HTML page about one run or many. It asks for nothing from the network and has no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import crmatch
from crmatch.analysis.curves import find_runs, finished_below, read_record
from crmatch.config import differences
from crmatch.errors import RequestError
from crmatch.files import write_file
from crmatch.report.charts import COLORS, Chart, Series, line_chart
from crmatch.report.run_view import Baseline, RunView, view_run
from crmatch.results import RunRecord

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
