"""A suite as specs: at the paper's settings, or scaled down by setting, recipe, steps, splits and keys. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crmatch.data.settings import Setting, parse_setting
from crmatch.errors import RequestError, unknown_name_error
from crmatch.methods import method_class
from crmatch.networks.config import WideResNetConfig
from crmatch.paper.tables import BENCH, PAPER_TABLES, SMALL, Column, PaperTable, Printed, Row
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, replace

MOST_SPLITS = 100


class Overrides(NamedTuple):
    """How a table differs from the paper's; nothing given: not at all."""

    setting: str | None = None
    recipe: str | None = None
    steps: int | None = None
    splits: tuple[int, ...] | None = None
    changes: Mapping[str, Any] = {}
    """Keys changed in every run of a method that has them."""
    claims: bool = False


class Cell(NamedTuple):
    """What stands behind one value."""

    specs: tuple[RunSpec, ...]
    """One per split."""
    printed: Printed | None
    measure: str | None


class Grid(NamedTuple):
    """A table before its values."""

    suite: PaperTable
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    """By row and column; None: there is no such cell."""
    splits: tuple[int, ...]
    settings: Mapping[str, Setting]
    """Name -> what it stands for, of every spec."""
    notes: tuple[str, ...]

    @property
    def specs(self) -> list[RunSpec]:
        """Every run of the table once, all of the first split before those of the next."""
        found: dict[RunSpec, None] = {}
        for cell in (cell for row in self.cells for cell in row if cell):
            found |= dict.fromkeys(cell.specs)
        return sorted(found, key=lambda spec: self.splits.index(spec.split))

    def place(self, spec: RunSpec) -> str:
        """The first cell that a run stands in, and its split, in words."""
        rows = zip(self.rows, self.cells, strict=True)
        row, column = next(
            (row, column)
            for row, cells in rows
            for column, cell in zip(self.columns, cells, strict=True)
            if cell and spec in cell.specs
        )
        return f"{name_row(self.suite, row)}, {name_column(column)}, split {spec.split}"


def name_row(suite: PaperTable, row: Row) -> str:
    """The labels of a row; several ones each after its head."""
    if len(row.labels) == 1:
        return row.labels[0]
    named = [(head, label) for head, label in zip(suite.heads, row.labels, strict=True) if head or label]
    return ", ".join(f"{head} {label or '–'}".strip() for head, label in named)


def name_column(column: Column) -> str:
    """The label of a column after that of its group."""
    return f"{column.group} {column.label}".strip()


def find_table(name: str) -> PaperTable:
    """The suite of that name."""
    if name not in PAPER_TABLES:
        raise unknown_name_error("table", name, PAPER_TABLES)
    return PAPER_TABLES[name]()


def parse_splits(text: str) -> tuple[int, ...]:
    """`1-5`, `2` or `1,3,5`."""
    splits: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= MOST_SPLITS:
            raise RequestError(f"--splits {text!r} is no list of splits from 1 to {MOST_SPLITS}.\nWrite 1-5, 2 or 1,3,5.")
        splits += range(first, last + 1)
    return tuple(dict.fromkeys(splits))


def make_grid(suite: PaperTable, scale: Overrides | None = None, workspace: Workspace | None = None) -> Grid:
    """The specs and printed values of every cell of `suite`."""
    data_dir = workspace.data_dir if workspace else None
    scale = scale or Overrides()
    if scale.claims and not suite.unprinted_rows:
        having = ", ".join(name for name, make in PAPER_TABLES.items() if make().unprinted_rows)
        raise RequestError(f"--claims adds nothing to {suite.name}.\nTables with such rows: {having}")
    rows = suite.rows + (suite.unprinted_rows if scale.claims else ())
    _check_changes(suite, rows, scale.changes)
    columns, printed_columns, notes = _columns(suite, scale, data_dir)
    settings = {column.setting: parse_setting(column.setting, data_dir) for column in columns}
    splits = scale.splits or suite.splits
    cells = tuple(
        tuple(
            Cell(
                tuple(_spec(row, column, settings[column.setting], scale, split) for split in splits),
                None if index is None else row.values[index],
                row.measure,
            )
            if row.exists[kept]
            else None
            for kept, (column, index) in enumerate(zip(columns, printed_columns, strict=True))
        )
        for row in rows
    )
    settings = {setting.name: setting for setting in settings.values()}
    grid = Grid(suite, "", columns, rows, cells, splits, settings, (*suite.notes, *notes))
    return grid._replace(title=_title(grid, scale))


def _columns(
    suite: PaperTable, scale: Overrides, data_dir: Path | None
) -> tuple[tuple[Column, ...], list[int | None], list[str]]:
    """Columns, for each of them the paper's column whose values stand beside ours, and what must be said about that.

    Under another setting, columns that differ only in their setting become one. Beside it stand the paper's values of the same
    data set, else of the setting where the paper makes its analyses, else none.
    """
    indices: list[int | None] = list(range(len(suite.columns)))
    if scale.setting is None:
        return suite.columns, indices, []
    asked = parse_setting(scale.setting, data_dir)
    paper = {column.setting for column in suite.columns}
    if len(paper) == 1:
        if asked.name in paper:
            return suite.columns, indices, []
        columns = tuple(column._replace(setting=scale.setting, network={}) for column in suite.columns)
        return columns, indices, [f"The paper's values are those of {paper.pop()}: compare orders, not values."]
    same = [index for index, column in enumerate(suite.columns) if column.setting == asked.name]
    alike = [index for index, column in enumerate(suite.columns) if column.setting.partition("@")[0] == asked.stem]
    bench = [index for index, column in enumerate(suite.columns) if column.setting == BENCH]
    beside = next(iter([*same, *alike, *bench]), None)
    one = (Column(asked.name, scale.setting),)
    if same or beside is None:
        return one, [beside], []
    return one, [beside], [f"The paper's values are those of {suite.columns[beside].setting}: compare orders, not values."]


def _spec(row: Row, column: Column, setting: Setting, scale: Overrides, split: int) -> RunSpec:
    """The run of one cell and split: the recipe, the column's network, keys asked for, the column's keys, the row's."""
    spec = recipe(setting, row.method, scale.recipe)
    changes = dict(column.network) | {key: value for key, value in scale.changes.items() if _has(row.method, key)}
    if row.small:
        changes |= _small_network(spec)
    changes |= column.changes
    changes |= {column.key_aliases.get(key, key): value for key, value in row.changes.items()}
    if scale.steps is not None:
        changes |= {"plan.steps": scale.steps, "plan.unlabeled_epochs": None}
    return replace(spec, **changes, split=split)


def _small_network(spec: RunSpec) -> dict[str, Any]:
    if not isinstance(spec.network, WideResNetConfig):
        raise RequestError(
            f"small-network needs a Wide ResNet; {spec.setting} has {spec.network.kind}.\nName another --setting."
        )
    filters = spec.network.filters
    return SMALL if filters > 4 * SMALL["network.filters"] else {"network.filters": max(1, filters // 4)}


def _has(method: str, key: str) -> bool:
    """Whether runs of `method` have the key: all have those that are not the method's."""
    section, _, name = key.partition(".")
    return section != "method" or name in method_class(method).model_fields


def _check_changes(suite: PaperTable, rows: Sequence[Row], changes: Mapping[str, Any]) -> None:
    """Refuse keys by which the table's own cells differ, keys that name a run, and keys that no method of it has."""
    own = {key for row in rows for key in row.changes} | {key for column in suite.columns for key in column.changes}
    own |= {key for column in suite.columns for key in column.key_aliases.values()}
    own |= {"network.filters"} if any(row.small for row in rows) else set()
    for key in changes:
        if key in own:
            raise RequestError(f"--set {key}: the rows or columns of {suite.name} differ in it.\nLeave it out.")
        if key in ("setting", "recipe", "split", "plan.steps", "method.name"):
            raise RequestError(f"--set {key} cannot be asked of a table.\nUse --setting, --recipe, --splits and --steps.")
        methods = {row.method for row in rows}
        if not any(_has(method, key) for method in methods):
            known = {f"method.{name}" for method in methods for name in method_class(method).model_fields}
            raise unknown_name_error("key", key, known)


def _title(grid: Grid, scale: Overrides) -> str:
    """Number, caption, and how the table is not the paper's."""
    suite, specs = grid.suite, grid.specs
    splits = f"split{'s' * (len(grid.splits) > 1)} {format_splits(grid.splits)} (n = {len(grid.splits)})"
    parts = [*dict.fromkeys(spec.setting for spec in specs)] if scale.setting else []
    recipes = ", ".join(dict.fromkeys(spec.recipe for spec in specs))
    parts += [f"recipe {recipes}"] if recipes != "paper" or scale.setting else []
    lengths = {spec.plan.steps for spec in specs}
    if len(lengths) == 1 and None not in lengths and (scale.steps or parts):
        parts.append(f"{next(iter(lengths)):,} steps")
    parts += [f"{key}={value}" for key, value in scale.changes.items()]
    scaled = ", ".join(parts) or "the paper's settings"
    return f"{suite.number}: {suite.caption}; {scaled}, {splits}"


def format_splits(splits: Sequence[int]) -> str:
    """`1-5` for five in a row, else `1, 3`."""
    if len(splits) > 1 and list(splits) == list(range(splits[0], splits[-1] + 1)):
        return f"{splits[0]}-{splits[-1]}"
    return ", ".join(map(str, splits))
