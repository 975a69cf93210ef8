"""The runs behind a table: at the paper's settings, or with another setting, recipe or length. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crmatch.data.settings import Setting
from crmatch.errors import RequestError, unknown_name_error
from crmatch.methods import METHODS, Preset, build_method, method_class, title_of
from crmatch.methods.base import StoredMethod
from crmatch.own_code import is_reference, short_name
from crmatch.paper.tables import BENCH, PAPER_TABLES, SMALL, Column, PaperTable, Printed, Row
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, flatten, replace

MOST_SPLITS = 100
POLICIES = {"randaugment": "RandAugment", "ctaugment": "CTAugment"}


class Overrides(NamedTuple):
    """How a table differs from the paper's; by default it does not."""

    setting: str | None = None
    recipe: str | None = None
    steps: int | None = None
    splits: tuple[int, ...] | None = None
    changes: Mapping[str, Any] = {}  # keys changed in every run whose method has them
    unprinted_rows: bool = False  # whether to add the rows that the paper does not print (`--unprinted`)


class GridCell(NamedTuple):
    """The runs behind one value, one per split, and the paper's value."""

    specs: tuple[RunSpec, ...]
    printed: Printed | None
    measure: str | None


class Grid(NamedTuple):
    """A table before it has values."""

    table: PaperTable
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    cells: tuple[tuple[GridCell | None, ...], ...]  # by row and column; None: there is no such cell
    splits: tuple[int, ...]
    settings: Mapping[str, Setting]  # the setting of every spec by its name, but of data sets whose file is gone
    notes: tuple[str, ...]

    @property
    def specs(self) -> list[RunSpec]:
        """Every run of the table once, all runs of the first split before those of the next."""
        specs = dict.fromkeys(spec for row in self.cells for cell in row if cell for spec in cell.specs)
        return sorted(specs, key=lambda spec: self.splits.index(spec.split))

    def is_trainable(self, spec: RunSpec) -> bool:
        """Whether the method and the data of a run are here."""
        return spec.setting in self.settings and not isinstance(spec.method, StoredMethod)

    def place(self, spec: RunSpec) -> str:
        """The row, the column and the split of a run; a run in several cells is named after the first."""
        row, column = next(
            (row, column)
            for row, cells in zip(self.rows, self.cells, strict=True)
            for column, cell in zip(self.columns, cells, strict=True)
            if cell and spec in cell.specs
        )
        return f"{self.table.row_name(row)}, {column.name}, split {spec.split}"


def find_table(name: str) -> PaperTable:
    """The table `name` of the paper."""
    if name not in PAPER_TABLES:
        raise unknown_name_error("table", name, PAPER_TABLES)
    return PAPER_TABLES[name]


def parse_splits(text: str) -> tuple[int, ...]:
    """Parse `1-5`, `2` or `1,3,5`."""
    splits: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= MOST_SPLITS:
            raise RequestError(f"--splits {text!r} is not a list of splits from 1 to {MOST_SPLITS}.\nWrite 1-5, 2 or 1,3,5.")
        splits += range(first, last + 1)
    return tuple(dict.fromkeys(splits))


def variant(text: str) -> tuple[str, dict[str, Any], str]:
    """The method, the changed keys and the title of `fixmatch+ctaugment` or `crmatch+flexmatch`, or of a method by itself.

    After the plus sign stands a strong augmentation policy, or a method whose confidence rule is used.
    """
    method, plus, name = text.partition("+")
    if _is_gone(text) or not plus:
        return text, {}, short_name(text) if _is_gone(text) else title_of(build_method(text))
    rules = {rule: entry for rule, entry in METHODS.items() if isinstance(entry, Preset)}
    title = title_of(build_method(method))
    if name in POLICIES:
        return method, {"augmentation.policy": name}, f"{title} ({POLICIES[name]})"
    if name not in rules:
        raise unknown_name_error("policy or rule", name, [*POLICIES, *rules])
    return method, {f"method.{key}": value for key, value in rules[name].changes.items()}, f"{title} ({rules[name].title})"


def own_table(methods: Sequence[str], settings: Sequence[str]) -> PaperTable:
    """A table of the user's own: a row for each method, as `variant` reads it, and a column for each setting."""
    rows = [variant(text) for text in methods]
    no_values = "|".join("-" for _ in settings)
    return PaperTable(
        "own",
        "",
        "test error in percent",
        ("method",),
        columns=tuple(Column(short_name(setting.rstrip("/")), setting) for setting in settings),
        rows=tuple(Row((title,), no_values, changes, method) for method, changes, title in rows),
    )


def _is_gone(reference: str) -> bool:
    """Whether `path/mine.py:Name` names a file that is not there; its finished runs are then still shown."""
    return is_reference(reference) and not Path(reference.rpartition(":")[0]).is_file()


def make_grid(
    table: PaperTable,
    overrides: Overrides | None = None,
    workspace: Workspace | None = None,
    recorded: Callable[[], Iterable[RunSpec]] = lambda: (),
) -> Grid:
    """The specs and the printed value of every cell of `table`.

    `recorded` are the specs of finished runs, the oldest first: a method or data set whose file is gone is looked up there.
    """
    overrides, workspace = overrides or Overrides(), workspace or Workspace()
    if overrides.unprinted_rows and not table.unprinted_rows:
        having = ", ".join(name for name, other in PAPER_TABLES.items() if other.unprinted_rows)
        raise RequestError(f"--unprinted adds nothing to {table.name}.\nTables with such rows: {having}")
    rows = table.rows + (table.unprinted_rows if overrides.unprinted_rows else ())
    _check_changes(table, rows, overrides.changes)
    columns, printed_columns, notes = _columns(table, overrides.setting, workspace)
    present = [column.setting for column in columns if not _is_gone(column.setting.rpartition("@")[0])]
    settings = {name: workspace.setting(name) for name in present}
    splits = overrides.splits or table.splits

    def make_cell(row: Row, column: Column, printed: int | None) -> GridCell | None:
        if column.setting in settings and not _is_gone(row.method):
            specs = tuple(_spec(row, column, settings[column.setting], overrides, split) for split in splits)
        elif (newest := _newest(row, column, overrides, recorded())) is not None:
            specs = tuple(replace(newest, split=split) for split in splits)
        else:
            return None
        return GridCell(specs, None if printed is None else row.values[printed], row.measure)

    cells = tuple(
        tuple(
            make_cell(row, column, printed) if text else None
            for column, printed, text in zip(columns, printed_columns, row.printed.split("|"), strict=False)
        )
        for row in rows
    )
    gone = [name for name in (*(row.method for row in rows), *(column.setting for column in columns)) if _is_gone(_file(name))]
    if gone and not any(cell for row in cells for cell in row):
        raise RequestError(f"{gone[0]}: there is neither this file nor a finished run of it.\nCheck the path.")
    notes += [f"{short_name(name)}: its file is not here; the newest of its finished runs are shown." for name in gone]
    by_name = {setting.name: setting for setting in settings.values()}
    grid = Grid(table, "", columns, rows, cells, splits, by_name, (*table.notes, *notes))
    return grid._replace(title=_title(grid, overrides))


def _columns(
    table: PaperTable, setting: str | None, workspace: Workspace
) -> tuple[tuple[Column, ...], list[int | None], list[str]]:
    """The columns, the index of the paper's column that each is compared with, and a note if their settings differ.

    With another setting, columns that differ only in their setting become one. It is compared with the paper's column of the
    same setting, else of the same data set, else of the setting of the paper's analyses, else with none.
    """
    indices: list[int | None] = [*range(len(table.columns))]
    printed = [column.setting for column in table.columns]
    if setting is None:
        return table.columns, indices, []
    asked = workspace.setting(setting)
    if set(printed) == {asked.name}:
        return table.columns, indices, []
    if len(set(printed)) == 1:
        columns = tuple(column._replace(setting=setting, network={}) for column in table.columns)
    else:
        columns = (Column(asked.name, setting),)
        same_data = [name for name in printed if name.partition("@")[0] == asked.stem]
        chosen = next((name for name in (asked.name, *same_data, BENCH) if name in printed), None)
        indices = [None if chosen is None else printed.index(chosen)]
    compared = None if indices[0] is None else printed[indices[0]]
    differs = compared not in (None, asked.name)
    return columns, indices, [f"The paper's values are for {compared}: compare the order, not the values."] * differs


def _file(name: str) -> str:
    """`path/mine.py:function` of the setting `path/mine.py:function@4`."""
    return name.rpartition("@")[0] if is_reference(name.rpartition("@")[0]) else name


def _newest(row: Row, column: Column, overrides: Overrides, recorded: Iterable[RunSpec]) -> RunSpec | None:
    """The newest of the recorded specs of a method on a setting, with the overrides that are asked for.

    Among runs with different values of the method, those with the most frequent values are taken.
    """
    asked = {"recipe": overrides.recipe, "plan.steps": overrides.steps}
    wanted = {"method.name": short_name(row.method), "setting": short_name(column.setting), **overrides.changes}
    wanted |= {key: value for key, value in asked.items() if value is not None}
    fitting = [spec for spec in recorded if wanted.items() <= {k: v for k, v in flatten(spec.to_json()) if k in wanted}.items()]
    if not fitting:
        return None
    usual, _ = Counter(spec.method for spec in fitting).most_common(1)[0]
    return [spec for spec in fitting if spec.method == usual][-1]


def _spec(row: Row, column: Column, setting: Setting, overrides: Overrides, split: int) -> RunSpec:
    """The run of one cell and split. Later changes win: the column's network, overrides, the column, the row, the length."""
    spec = recipe(setting, row.method, overrides.recipe)
    changes = dict(column.network) | {key: value for key, value in overrides.changes.items() if _has(row.method, key)}
    if row.small:
        changes |= _small_network(spec)
    changes |= column.changes
    changes |= {column.key_aliases.get(key, key): value for key, value in row.changes.items()}
    if overrides.steps is not None:
        changes |= {"plan.steps": overrides.steps, "plan.unlabeled_epochs": None}
    return replace(spec, **changes, split=split)


def _small_network(spec: RunSpec) -> dict[str, Any]:
    filters = getattr(spec.network, "filters", None)
    if filters is None:
        found = f"small-network needs a network with network.filters; {spec.setting} has {spec.network.kind}"
        raise RequestError(f"{found}.\nUse another --setting.")
    return SMALL if filters > 4 * SMALL["network.filters"] else {"network.filters": max(1, filters // 4)}


def _has(method: str, key: str) -> bool:
    """Whether runs of `method` have the key; only keys of the section `method` depend on it."""
    section, _, name = key.partition(".")
    return section != "method" or name in method_class(method).model_fields


def _check_changes(table: PaperTable, rows: Sequence[Row], changes: Mapping[str, Any]) -> None:
    """Raise an error for keys in which the table's cells differ, keys with their own option, and keys that no method has."""
    own = {key for row in rows for key in row.changes} | {key for column in table.columns for key in column.changes}
    own |= {key for column in table.columns for key in column.key_aliases.values()}
    own |= {"network.filters"} if any(row.small for row in rows) else set()
    methods = {row.method for row in rows if not _is_gone(row.method)}
    for key in changes:
        if key in own:
            raise RequestError(f"--set {key}: the rows or columns of {table.name} differ in it.\nLeave it out.")
        if key in ("setting", "recipe", "split", "plan.steps", "method.name"):
            raise RequestError(f"--set {key} does not work with a table.\nUse --setting, --recipe, --splits and --steps.")
        if methods and not any(_has(method, key) for method in methods):
            known = {f"method.{name}" for method in methods for name in method_class(method).model_fields}
            raise unknown_name_error("key", key, known)


def _title(grid: Grid, overrides: Overrides) -> str:
    """The place in the paper, the caption, and the differences from the paper's table."""
    specs = grid.specs
    own = not grid.table.number
    parts = [*dict.fromkeys(spec.setting for spec in specs)] if overrides.setting else []
    recipes = ", ".join(dict.fromkeys(spec.recipe for spec in specs))
    parts += [f"recipe {recipes}"] if recipes != "paper" or overrides.setting or own else []
    lengths = {spec.plan.steps for spec in specs}
    if len(lengths) == 1 and None not in lengths and (overrides.steps or parts):
        parts.append(f"{next(iter(lengths)):,} steps")
    parts += [f"{key}={value}" for key, value in overrides.changes.items()]
    changed, count = ", ".join(parts) or "the paper's settings", len(grid.splits)
    first, last = grid.splits[0], grid.splits[-1]
    in_a_row = count > 1 and list(grid.splits) == list(range(first, last + 1))
    splits = f"{first}-{last}" if in_a_row else ", ".join(map(str, grid.splits))
    number = f"{grid.table.number}: " if grid.table.number else ""
    return f"{number}{grid.table.caption}; {changed}, split{'s' * (count > 1)} {splits} (n = {count})"
