"""Records -> tables: each cell with mean, deviation and number of splits, the paper's value, and the runs it came from.

The headline of each record is used (the error of its final model, or the median of its last 20 evaluations, as its spec
says); the lowest error over the test set's evaluations never is. Imports no torch.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Literal, NamedTuple

from crmatch.atomic_files import read_json
from crmatch.errors import DataError, RequestError
from crmatch.paper.grid import Cell, Grid, name_row
from crmatch.runs.directory import run_directory
from crmatch.runs.record import HEADLINES, RunRecord, parse_record
from crmatch.spec.recipes import train_command
from crmatch.spec.run_spec import RunSpec, differences


class Run(NamedTuple):
    """A finished run and where it lies."""

    record: RunRecord
    source: str


Find = Callable[[RunSpec], Run | None]


class Value(NamedTuple):
    """Mean over runs, deviation with n - 1 (None for one run), and n."""

    mean: float
    std: float | None
    n: int


Measure = Callable[[Run, str], Value | None]
"""What an analysis found of a run, by the name of the row's measure; None: not measured yet."""


class TableCell(NamedTuple):
    """A cell with its value."""

    cell: Cell
    value: Value | None
    rank: Literal["best", "second", ""]
    runs: tuple[str, ...]
    missing: tuple[str, ...]
    """Commands that fill it."""
    problem: str = ""
    """Why a run of it has no record, e.g. that it diverged."""


class Table(NamedTuple):
    """A grid with its values."""

    grid: Grid
    cells: tuple[tuple[TableCell | None, ...], ...]
    notes: tuple[str, ...]

    @property
    def same_n(self) -> bool:
        """Whether every value is a mean over all splits of the title."""
        counts = {len(cell.runs) for row in self.cells for cell in row if cell and cell.runs}
        return counts <= {len(self.grid.splits)}


def rounded(value: float) -> str:
    """Two decimals, halves up, as people round: 10.015 is 10.02 whatever its binary neighbor."""
    return str(Decimal(repr(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def error_value(records: Sequence[RunRecord]) -> Value:
    """Mean, deviation (n - 1) and n of the headline errors of runs that differ in split and seed alone."""
    errors = []
    for record in records:
        for key, (one, other) in differences(records[0].spec, record.spec).items():
            if key not in ("split", "seed"):
                raise RequestError(
                    f"records of different runs cannot share a cell: {key} is {one!r} and {other!r}.\n"
                    "Average only runs that differ in split and seed."
                )
        if record.error is None:
            raise RequestError(f"a run on {record.spec.setting} has no test error.\nTables need a test set.")
        errors.append(record.error)
    return mean_value(errors)


def mean_value(values: Sequence[float]) -> Value:
    """Mean, deviation with n - 1, n."""
    return Value(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def runs_in(out: Path, grid: Grid) -> Find:
    """Finished runs below `out`, where `crmatch train` and `crmatch table` keep them."""

    def find(spec: RunSpec) -> Run | None:
        directory = run_directory(out, spec, grid.settings[spec.setting])
        record = directory.read_record()
        return None if record is None else Run(_of_spec(record, spec, directory.path), str(directory.path))

    return find


def records_in(folder: Path) -> Find:
    """Records kept as JSON files anywhere below `folder`, whatever their names."""
    if not folder.is_dir():
        raise DataError(f"--records {folder} is no directory.\nName one with record files (*.json).")
    found: dict[RunSpec, Run] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.suffixes[-2:] in ([".probe", ".json"], [".distances", ".json"]):
            continue
        record = parse_record(read_json(path), path)
        if (other := found.get(record.spec)) is not None and other.record.error != record.error:
            raise DataError(f"{other.source} and {path} are records of one run with different errors.\nRemove one of them.")
        found[record.spec] = Run(record, str(path))
    return found.get


def analysis_file(source: str, analysis: str) -> Path:
    """Where the JSON output of `crmatch probe` or `crmatch distances` is kept: in the run, or beside its record."""
    path = Path(source)
    return path.with_suffix(f".{analysis}.json") if path.suffix == ".json" else path / f"{analysis}.json"


def kept_measure(analysis: str) -> Measure:
    """What an analysis found of runs, from the files where its output is kept."""

    def measure(run: Run, name: str) -> Value | None:
        path = analysis_file(run.source, analysis)
        if not path.exists():
            return None
        values = read_json(path)
        try:
            return Value(float(values[name]["mean"]), float(values[name]["std"]), int(values[name]["n"]))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{path} has no {name!r} with mean, std and n"
            raise DataError(f"{reason}.\nMake it anew: {analysis_command(run.source, analysis)}") from error

    return measure


def analysis_command(source: str, analysis: str) -> str:
    """The command that makes the file of an analysis."""
    return f"crmatch {analysis} {shlex.quote(source)} --json > {shlex.quote(str(analysis_file(source, analysis)))}"


def fill(
    grid: Grid,
    find: Find,
    *,
    options: Sequence[str] = (),
    measure: Measure | None = None,
    problems: Mapping[RunSpec, str] | None = None,
) -> Table:
    """The table of a grid, from the runs that `find` finds.

    Args:
        grid: which runs stand behind which cell.
        find: the run of a spec, None where it is not finished.
        options: what the commands that fill missing cells end with (`--out`, `--data-dir`).
        measure: for tables whose cells are analyses of runs; by default what `kept_measure` finds.
        problems: runs that were tried and have no record, with the reason.
    """
    found = {spec: run for spec in grid.specs if (run := find(spec)) is not None}
    _check_data(list(found.values()))
    rows = [[cell and _fill_cell(grid, cell, found, options, measure, problems or {}) for cell in row] for row in grid.cells]
    return Table(grid, _ranked(grid, rows), (*grid.notes, *_notes(grid, list(found.values()))))


def _fill_cell(
    grid: Grid,
    cell: Cell,
    found: Mapping[RunSpec, Run],
    options: Sequence[str],
    measure: Measure | None,
    problems: Mapping[RunSpec, str],
) -> TableCell:
    runs = [found[spec] for spec in cell.specs if spec in found]
    absent = [spec for spec in cell.specs if spec not in found]
    missing = [train_command(spec, grid.settings[spec.setting], *options) for spec in absent]
    if cell.measure is None:
        value = error_value([run.record for run in runs]) if runs else None
    else:
        assert grid.suite.analysis is not None
        measure = measure or kept_measure(grid.suite.analysis)
        results = [(run, measure(run, cell.measure)) for run in runs]
        missing += [analysis_command(run.source, grid.suite.analysis) for run, result in results if result is None]
        runs = [run for run, result in results if result is not None]
        value = _over_runs([result for _, result in results if result is not None])
    problem = next((problems[spec] for spec in absent if spec in problems), "")
    return TableCell(cell, value, "", tuple(run.source for run in runs), tuple(missing), problem)


def _over_runs(values: Sequence[Value]) -> Value | None:
    """One run: its own mean, deviation and n (repeats, images). Several: mean and deviation over the runs."""
    if len(values) < 2:
        return values[0] if values else None
    return mean_value([value.mean for value in values])


def _ranked(grid: Grid, rows: list[list[TableCell | None]]) -> tuple[tuple[TableCell | None, ...], ...]:
    """Mark the lowest value and, where the paper does, the second lowest, both as printed, so that ties share a mark.

    Only cells with as many runs as any other compete: a mean over fewer splits does not win.
    """
    most = max((len(cell.runs) for row in rows for cell in row if cell), default=0)
    values: dict[int, set[Decimal]] = {}
    """Column (or 0 for the whole table) -> the values that compete."""

    def place(column: int) -> int:
        return 0 if grid.suite.best == "table" else column

    for row in rows:
        for column, cell in enumerate(row):
            if cell and cell.value and len(cell.runs) == most:
                values.setdefault(place(column), set()).add(Decimal(rounded(cell.value.mean)))

    def rank(cell: TableCell, column: int) -> Literal["best", "second", ""]:
        if cell.value is None or len(cell.runs) != most or grid.suite.best == "none":
            return ""
        order = sorted(values[place(column)]).index(Decimal(rounded(cell.value.mean)))
        return "best" if order == 0 else "second" if order == 1 and grid.suite.second else ""

    return tuple(tuple(cell and cell._replace(rank=rank(cell, column)) for column, cell in enumerate(row)) for row in rows)


def _notes(grid: Grid, runs: Sequence[Run]) -> list[str]:
    """What a reader must know to trust the numbers: which error counts, and whether the numerics are the same."""
    notes = []
    if grid.suite.analysis is None:
        rules: dict[str, list[str]] = {}
        for row, cells in zip(grid.rows, grid.cells, strict=True):
            for rule in {spec.headline for cell in cells if cell for spec in cell.specs}:
                rules.setdefault(rule, []).append(name_row(grid.suite, row))
        whose = [HEADLINES[rule] + (f" ({', '.join(rows)})" if len(rules) > 1 else "") for rule, rows in sorted(rules.items())]
        notes.append(f"Test error of the {'; '.join(whose)}; deviation over splits with n - 1.")
    else:
        within = {"probe": "repeats", "distances": "images"}[grid.suite.analysis]
        notes.append(f"Mean and deviation over splits with n - 1; of a single run, over its {within}.")
    numerics = sorted({run.record.numerics for run in runs})
    if len(numerics) > 1:
        notes.append(f"MIXED NUMERICS {', '.join(map(str, numerics))}: runs of different versions; train the older ones again.")
    elif numerics:
        notes.append(f"Numerics {numerics[0]}.")
    return notes


def _check_data(runs: Sequence[Run]) -> None:
    """Refuse runs of one setting on different images."""
    seen: dict[tuple[str, int], Run] = {}
    for run in runs:
        spec = run.record.spec
        first = seen.setdefault((spec.setting, spec.data.image_size), run)
        if first.record.data_fingerprint != run.record.data_fingerprint:
            raise RequestError(
                f"{first.source} and {run.source} were trained on different images of {spec.setting}.\n"
                "Train one of them again (--fresh trains all), or choose another --out."
            )


def _of_spec(record: RunRecord, spec: RunSpec, path: Path) -> RunRecord:
    changed = [f"{key} is {old!r} there, {new!r} here" for key, (old, new) in differences(record.spec, spec).items()]
    if changed:
        raise RequestError(
            f"{path} holds a run of another spec: {'; '.join(changed[:3])}.\nChoose another --out, or remove it."
        )
    return record
