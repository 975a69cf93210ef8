"""Tables from records: each cell has mean, standard deviation and number of runs, the paper's value, and the runs it came from.

Each record enters with its headline error (of its final model, or the median of its last 20 evaluations, as its spec says),
never with the lowest error on the test set. Imports no torch.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Literal, NamedTuple

from crmatch.analysis.curves import Summary, summarize
from crmatch.atomic_files import read_json
from crmatch.errors import DataError, RequestError
from crmatch.paper.grid import Grid, GridCell
from crmatch.paper.tables import PaperTable
from crmatch.runs.directory import run_directory, train_command
from crmatch.runs.finished import records
from crmatch.runs.record import HEADLINES, RunRecord, parse_record
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec


class Run(NamedTuple):
    """The record of a finished run, and its directory or file."""

    record: RunRecord
    source: str


Find = Callable[[RunSpec], Run | None]
"""Finds the run of a spec; None if it is not finished."""


class TableCell(NamedTuple):
    """A cell with its value."""

    grid_cell: GridCell
    value: Summary | None
    runs: tuple[str, ...]
    missing: tuple[str, ...]  # commands that train or analyze the missing runs
    problem: str  # why one of its runs has no record, e.g. that it diverged
    pseudo_labels_used: bool | None  # whether any pseudo-label counted in the loss; None: the method makes none
    rank: Literal["best", "second", ""] = ""


class FilledTable(NamedTuple):
    """A grid with its values."""

    grid: Grid
    cells: tuple[tuple[TableCell | None, ...], ...]
    notes: tuple[str, ...]

    def never_used(self, row: int) -> bool:
        """Whether the runs of a row made pseudo-labels and never used one."""
        used = {cell.pseudo_labels_used for cell in self.cells[row] if cell} - {None}
        return used == {False}

    @property
    def same_n(self) -> bool:
        """Whether every value is a mean over all splits of the title."""
        counts = {len(cell.runs) for row in self.cells for cell in row if cell and cell.runs}
        return counts <= {len(self.grid.splits)}


def rounded(value: float) -> str:
    """Two decimals, halves rounded up in decimal: 10.015 becomes 10.02 although its binary value is below it."""
    return str(Decimal(repr(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def finished_runs(workspace: Workspace) -> dict[RunSpec, Run]:
    """All finished runs of the workspace, the oldest first."""
    return {record.spec: Run(record, str(path)) for path, record in records(workspace.out).items()}


def runs_in(workspace: Workspace, grid: Grid) -> Find:
    """Find finished runs in the workspace, where `crmatch train` and `crmatch table` save them."""
    by_record = functools.cache(finished_runs)

    def find(spec: RunSpec) -> Run | None:
        if not grid.is_trainable(spec):  # without its code, the name of its directory is not known
            return by_record(workspace).get(spec)
        directory = run_directory(workspace.out, spec, grid.settings[spec.setting])
        record = directory.read_record()
        if record is None:
            return None
        directory.check_spec(record.spec, spec)
        return Run(record, str(directory.path))

    return find


def records_in(folder: Path) -> Find:
    """Find records in JSON files at any depth below `folder`."""
    return recorded_runs(folder).get


def recorded_runs(folder: Path) -> dict[RunSpec, Run]:
    """Records in JSON files at any depth below `folder`, by their specs; file names do not matter."""
    if not folder.is_dir():
        raise DataError(f"--records {folder} is not a directory.\nUse one that contains record files (*.json).")
    found: dict[RunSpec, Run] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.suffixes[-2:] in ([".probe", ".json"], [".distances", ".json"]):
            continue
        if path.name != "record.json" and (path.parent / "record.json").exists():  # another file of a run's directory
            continue
        record = parse_record(read_json(path), path)
        if (other := found.get(record.spec)) is not None and other.record.error != record.error:
            raise DataError(f"{other.source} and {path} are records of one run with different errors.\nRemove one of them.")
        found[record.spec] = Run(record, str(path))
    return found


def analysis_file(source: str, analysis: str) -> Path:
    """The file with the JSON output of `crmatch probe` or `crmatch distances`: in the run's directory or beside its record."""
    path = Path(source)
    if path.name == "record.json":
        path = path.parent
    return path.with_suffix(f".{analysis}.json") if path.suffix == ".json" else path / f"{analysis}.json"


def analysis_command(source: str, analysis: str) -> str:
    """The command that writes the file of an analysis."""
    return f"crmatch {analysis} {shlex.quote(source)} --json > {shlex.quote(str(analysis_file(source, analysis)))}"


def fill(grid: Grid, find: Find, *, options: Sequence[str] = (), problems: Mapping[RunSpec, str] | None = None) -> FilledTable:
    """Fill the cells of a grid with the values of its runs.

    `options` (`--out`, `--data-dir`) are appended to the commands of missing runs; `problems` say why runs that were tried
    have no record.
    """
    found = {spec: run for spec in grid.specs if (run := find(spec)) is not None}
    check_data(list(found.values()))
    rows = [[cell and _fill_cell(grid, cell, found, options, problems or {}) for cell in row] for row in grid.cells]
    return FilledTable(grid, _ranked(grid.table, rows), (*grid.notes, *_notes(grid, list(found.values()))))


def _fill_cell(
    grid: Grid, cell: GridCell, found: Mapping[RunSpec, Run], options: Sequence[str], problems: Mapping[RunSpec, str]
) -> TableCell:
    runs = [found[spec] for spec in cell.specs if spec in found]
    absent = [spec for spec in cell.specs if spec not in found]
    trainable = [spec for spec in absent if grid.is_trainable(spec)]
    missing = [train_command(spec, grid.settings[spec.setting], *options) for spec in trainable]
    if cell.measure is None or (analysis := grid.table.analysis) is None:
        errors = [run.record.error for run in runs if run.record.error is not None]
        if len(errors) < len(runs):
            raise RequestError(f"a run on {runs[0].record.spec.setting} has no test error.\nTables need a test set.")
        value = summarize(errors) if errors else None
    else:
        results = [(run, read_analysis(run, analysis, cell.measure)) for run in runs]
        missing += [analysis_command(run.source, analysis) for run, result in results if result is None]
        runs = [run for run, result in results if result is not None]
        summaries = [result for _, result in results if result is not None]
        # The deviation of a single run is over its repeats or images; that of several runs is over the runs.
        value = summarize([one.mean for one in summaries]) if len(summaries) > 1 else next(iter(summaries), None)
    problem = next((problems[spec] for spec in absent if spec in problems), "")
    used = [used for run in runs if cell.measure is None and (used := run.record.pseudo_labels_used) is not None]
    return TableCell(cell, value, tuple(run.source for run in runs), tuple(missing), problem, any(used) if used else None)


def read_analysis(run: Run, analysis: str, measure: str) -> Summary | None:
    """One result of the file of an analysis; None if there is no such file."""
    path = analysis_file(run.source, analysis)
    if not path.exists():
        return None
    values = read_json(path)
    try:
        return Summary(float(values[measure]["mean"]), float(values[measure]["std"]), int(values[measure]["n"]))
    except (KeyError, TypeError, ValueError) as error:
        found = f"{path} has no {measure!r} with mean, std and n"
        raise DataError(f"{found}.\nWrite it again: {analysis_command(run.source, analysis)}") from error


def _ranked(table: PaperTable, rows: list[list[TableCell | None]]) -> tuple[tuple[TableCell | None, ...], ...]:
    """Mark the lowest and, if the paper does, the second lowest value. Ties as printed share a mark.

    Only cells with the largest number of runs compete: a mean over fewer splits does not win.
    """
    most = max((len(cell.runs) for row in rows for cell in row if cell), default=0)

    def printed(cell: TableCell | None) -> Decimal | None:
        return Decimal(rounded(cell.value.mean)) if cell and cell.value and len(cell.runs) == most else None

    def ranked(cell: TableCell, column: int) -> TableCell:
        if table.best == "none" or (value := printed(cell)) is None:
            return cell
        rivals = [cell for row in rows for place, cell in enumerate(row) if place == column or table.best == "table"]
        order = sorted({rival for cell in rivals if (rival := printed(cell)) is not None}).index(value)
        return cell._replace(rank="best" if order == 0 else "second" if order == 1 and table.second else "")

    return tuple(tuple(cell and ranked(cell, column) for column, cell in enumerate(row)) for row in rows)


def _notes(grid: Grid, runs: Sequence[Run]) -> list[str]:
    """Which error the table shows, and whether all runs have the same numerics."""
    if grid.table.analysis is None:
        rules: dict[str, list[str]] = {}
        for row, cells in zip(grid.rows, grid.cells, strict=True):
            for rule in {spec.headline for cell in cells if cell for spec in cell.specs}:
                rules.setdefault(rule, []).append(grid.table.row_name(row))
        whose = [HEADLINES[rule] + (f" ({', '.join(rows)})" if len(rules) > 1 else "") for rule, rows in sorted(rules.items())]
        notes = [f"Test error of the {'; '.join(whose)}; standard deviation (n - 1) over splits."]
    else:
        within = {"probe": "repeats", "distances": "images"}[grid.table.analysis]
        notes = [f"Mean and standard deviation (n - 1) over splits; for a single run, over its {within}."]
    return notes + numerics_note(runs)


def numerics_note(runs: Sequence[Run]) -> list[str]:
    """Whether all runs have the same numerics; nothing without runs."""
    numerics = sorted({run.record.numerics for run in runs})
    if len(numerics) > 1:
        return [f"MIXED NUMERICS {', '.join(map(str, numerics))}: runs of different versions; train the older ones again."]
    return [f"Numerics {numerics[0]}."] if numerics else []


def check_data(runs: Sequence[Run]) -> None:
    """Raise an error if runs of one setting were trained on different images."""
    seen: dict[tuple[str, int], Run] = {}
    for run in runs:
        spec = run.record.spec
        first = seen.setdefault((spec.setting, spec.data.image_size), run)
        if first.record.data_fingerprint != run.record.data_fingerprint:
            found = f"{first.source} and {run.source} were trained on different images of {spec.setting}"
            raise RequestError(f"{found}.\nTrain one of them again (--fresh trains all), or choose another --out.")
