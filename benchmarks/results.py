#!/usr/bin/env python3
"""Rewrite the tables in docs/ and the page about the paper's claims from the committed records, without training.

    python benchmarks/results.py                  # every table between markers in docs/**/*.md, and docs/results/claims.md
    python benchmarks/results.py --collect runs   # first copy the records of these tables and claims from finished runs

A table stands between two lines, the first of which says how it is made. The text around the tables is not changed:

    <!-- crmatch table ablation --setting digits@4 --splits 1-5 -->
    <!-- end of table -->

`<!-- runs with --minutes -->` in the first line makes a table of all committed records of such runs; their lengths differ from
machine to machine, so `crmatch table` cannot know them. `--collect` copies those that are not committed yet.

Only the image shape of a data set is needed. For the sets in `STORED` it is known here. If a set is neither in `STORED` nor
on this machine, its table is left unchanged, with a message.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from crmatch.atomic_files import read_json, write_file, write_json
from crmatch.data.packed import packed_path, write_packed
from crmatch.errors import RequestError
from crmatch.methods import title_of
from crmatch.paper.claims import make_plan
from crmatch.paper.formats import to_markdown
from crmatch.paper.grid import Grid, Overrides, find_table, make_grid, own_table, parse_splits
from crmatch.paper.intervals import estimate
from crmatch.paper.results import analysis_file, fill, recorded_runs, records_in, runs_in
from crmatch.paper.verdicts import Results, evaluate_claims, to_page
from crmatch.report.figures import draw_forest
from crmatch.runs.record import RunRecord, parse_record
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import FOLLOW_FROM_MINUTES
from crmatch.spec.run_spec import RunSpec, parse_assignments, replace

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORDS = DOCS / "results" / "records"
BLOCK = re.compile(r"(<!-- crmatch table (?P<arguments>[^>]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TIMED_BLOCK = re.compile(r"(<!-- runs with --minutes -->\n).*?(<!-- end of table -->)", re.DOTALL)

STORED = {"svhn_small": (32, 32, 3), "cifar10_small": (32, 32, 3)}
"""(height, width, channels) of packed sets that are not part of the project."""
CLAIMS = {"svhn_small@25": (1, 2, 3, 4, 5), "cifar10_small@25": (1, 2, 3), "digits@4": (1, 2, 3, 4, 5)}
"""Setting -> splits of the page about the paper's claims."""
HEADLINES = ("main", "ablation", "direction", "pairs", "head", "threshold")
"""Topics of the claims in the README's picture."""


@contextmanager
def workspace_for(settings: Iterable[str]) -> Iterator[Workspace]:
    """A workspace that knows the shapes of stored sets, or else the user's own data directory."""
    names = {setting.partition("@")[0] for setting in settings} & STORED.keys()
    with TemporaryDirectory() as directory:
        for name in names:
            write_packed(packed_path(name, Path(directory)), {"train_images": np.zeros((1, *STORED[name]), np.uint8)})
        yield Workspace.at(data_dir=Path(directory) if names else None)


def grid_of(arguments: str) -> Grid:
    """The grid of the arguments in a marker: those of `crmatch table` that define the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?")
    for option in ("--methods", "--settings", "--setting", "--recipe", "--splits"):
        parser.add_argument(option)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--unprinted", action="store_true")
    given = parser.parse_args(shlex.split(arguments))
    changes: dict[str, Any] = parse_assignments(given.set)
    splits = parse_splits(given.splits) if given.splits else None
    scale = Overrides(given.setting, given.recipe, given.steps, splits, changes, given.unprinted)
    settings = (given.settings or given.setting or "").split(",")
    table = own_table(given.methods.split(","), settings) if given.methods else find_table(given.name)
    with workspace_for(settings) as workspace:
        return make_grid(table, scale, workspace)


def collect(grid: Grid, out: Path) -> int:
    """Copy records and analyses that are not committed or have newer numerics; returns the number of files."""
    here, there = records_in(RECORDS), runs_in(Workspace.at(out), grid)
    copied = 0
    for spec, run in [(spec, run) for spec in grid.specs if (run := there(spec)) is not None]:
        kept = here(spec)
        target = Path(kept.source) if kept else record_path(spec, Path(run.source))
        newer = kept is None or kept.record.numerics < run.record.numerics
        files = {target: run.record.model_dump(mode="json")} if newer else {}
        if newer or (kept and kept.record == run.record):  # otherwise its analyses belong to another model
            for name in ("probe", "distances"):
                made, copy = analysis_file(run.source, name), analysis_file(str(target), name)
                files |= {copy: read_json(made)} if made.exists() and (newer or not copy.exists()) else {}
        for path, values in files.items():
            write_json(path, values)
        copied += len(files)
    return copied


def collect_timed(out: Path) -> int:
    """Copy the records of runs of `quick` with `--minutes`, unless one of the same name is committed; returns their number."""
    found = {path: parse_record(read_json(path), path) for path in out.rglob("record.json")}
    new = {record_path(record.spec, path.parent): record for path, record in found.items() if is_timed(record.spec)}
    new = {target: record for target, record in new.items() if not target.exists()}
    for target, record in new.items():
        write_json(target, record.model_dump(mode="json"))
    return len(new)


def record_path(spec: RunSpec, directory: Path) -> Path:
    """Where the record of the run in `directory` is committed."""
    return RECORDS / spec.setting / f"{directory.parent.name}-{directory.name}.json"


def is_timed(spec: RunSpec) -> bool:
    """Whether this is a run of `quick` with `--minutes`."""
    return spec.plan.minutes is not None and spec.recipe == "quick"


def rebuilt(page: Path, out: Path | None) -> str:
    """The text of a page with every table rewritten."""

    def table(match: re.Match[str]) -> str:
        try:
            grid = grid_of(match["arguments"])
        except RequestError as error:
            print(f"{page.name}: {match['arguments']} is left as it is: {error}", file=sys.stderr)
            return match[0]
        if out is not None:
            print(f"{page.name}: {match['arguments']}: {collect(grid, out)} new files", file=sys.stderr)
        text = to_markdown(fill(grid, records_in(RECORDS)))
        return f"{match[1]}\n{text.replace(f'{DOCS.parent}/', '')}\n{match[3]}"

    text = BLOCK.sub(table, page.read_text(encoding="utf-8"))
    return TIMED_BLOCK.sub(lambda match: f"{match[1]}{timed_runs()}\n{match[2]}", text)


def timed_runs() -> str:
    """Runs of `quick` with `--minutes`, grouped by spec without split and length: mean error over splits, 95 % interval."""
    groups: dict[tuple[RunSpec, int], list[RunRecord]] = defaultdict(list)
    length = {f"plan.{key}": 1 for key in FOLLOW_FROM_MINUTES}
    for spec, run in recorded_runs(RECORDS).items():
        if is_timed(spec) and run.record.error is not None:
            groups[replace(spec, split=1, **length), run.record.machine["threads"]].append(run.record)
    header = "setting | method | px | minutes asked for | threads | minutes taken | steps | test error % | 95 % interval | n"
    rows = [f"| {header} |", "|" + " --- |" * 10]
    for (spec, threads), found in sorted(groups.items(), key=lambda group: (group[0][0].setting, group[0][0].plan.minutes)):
        errors = estimate([record.error for record in found if record.error is not None])
        sizes = f"{spec.plan.start_size}, {spec.data.image_size}" if spec.plan.start_size else spec.data.image_size
        cells = [spec.setting, title_of(spec.method), sizes, f"{spec.plan.minutes:g}", threads]
        cells += [span([record.seconds / 60 for record in found], ".1f"), span([record.steps for record in found], ",")]
        cells += [f"{errors.mean:.2f}", f"{errors.t[0]:.2f} to {errors.t[1]:.2f}" if errors.t else "–", errors.n]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def span(values: Sequence[float], form: str) -> str:
    """The lowest and the highest value."""
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def claims(out: Path | None) -> list[Results]:
    """The claims about every setting."""
    found = []
    with workspace_for(CLAIMS) as workspace:
        for setting, splits in CLAIMS.items():
            plan = make_plan([], setting, Overrides(recipe="quick", splits=splits), workspace)
            if out is not None:
                print(f"claims about {setting}: {collect(plan.grid, out)} new files", file=sys.stderr)
            found.append(evaluate_claims(plan, records_in(RECORDS)))
    return found


def claims_page(results: list[Results]) -> str:
    """The text of the page about the paper's claims."""
    return to_page(results, "claims.png", "make results").replace(f"{DOCS.parent}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--collect", type=Path, metavar="RUNS", help="first copy missing records from the finished runs in this directory"
    )
    options = parser.parse_args()
    if options.collect is not None:
        print(f"runs with --minutes: {collect_timed(options.collect)} new files", file=sys.stderr)
    results, found = DOCS / "results", claims(options.collect)
    write_file(results / "claims.md", claims_page(found).encode())
    for name, topics in (("claims.png", ()), ("claims-main.png", HEADLINES)):
        if tested := [one for one in found if one.sources]:
            draw_forest(tested[: 1 if topics else None], results / name, topics)
        else:
            (results / name).unlink(missing_ok=True)
    for page in sorted(DOCS.rglob("*.md")):
        text = rebuilt(page, options.collect)
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"{page.relative_to(DOCS.parent)} was rewritten", file=sys.stderr)


if __name__ == "__main__":
    main()
