"""A table as text: for the terminal, Markdown, LaTeX in the paper's layout, CSV, JSON. Imports no torch."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from crmatch.paper.grid import name_column, name_row
from crmatch.paper.results import Table, TableCell, Value, rounded
from crmatch.paper.tables import Printed

NOTHING = "–"


class Style(NamedTuple):
    """How a format writes numbers."""

    best: str
    second: str
    plus_minus: str
    size: str


MARKDOWN = Style("**{}**", "*{}*", " ± ", " (n = {})")
TERMINAL = Style("[bold]{}[/bold]", "[italic]{}[/italic]", " ± ", " (n = {})")
LATEX = Style(r"\textbf{{{}}}", r"\textit{{{}}}", r"$\pm$", "$_{{n={}}}$")
PLAIN = Style("{}", "{}", " ± ", " (n = {})")


def to_markdown(table: Table) -> str:
    """Title, table, notes, commands of missing cells, runs."""
    numbers = _footnotes(table)
    lines = [f"**{table.grid.title}**", ""]
    lines.append("| " + " | ".join([*table.grid.suite.heads, *_column_labels(table)]) + " |")
    lines.append("|" + "---|" * (len(table.grid.suite.heads) + len(table.grid.columns)))
    for labels, cells in _rows(table):
        texts = [_beside(cell, MARKDOWN, table, numbers, " (paper {})") if cell else "" for cell in cells]
        lines.append("| " + " | ".join([*labels, *texts]) + " |")
    lines += ["", *(f"- {note}" for note in _notes(table))]
    if numbers:
        lines += ["", "Missing:", "", *(f"- [{number}] `{command}`" for number, command in _commands(numbers))]
    if runs := list(_runs(table)):
        lines += ["", "<details><summary>Runs behind each cell</summary>", ""]
        lines += [f"- {where}: {', '.join(f'`{source}`' for source in sources)}" for where, sources in runs]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def to_terminal(table: Table) -> Any:
    """Renderables of rich: the table, the paper's values below ours, then notes, missing commands and runs."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table as RichTable
    from rich.text import Text

    numbers = _footnotes(table)
    heads = [*table.grid.suite.heads, *(f"{column.group}\n{column.label}".strip() for column in table.grid.columns)]
    shown = RichTable(*map(escape, heads), pad_edge=False)
    for row, (labels, cells) in zip(table.grid.rows, _rows(table), strict=True):
        if row.ruled:
            shown.add_section()
        texts = [_beside(cell, TERMINAL, table, numbers, "\n[dim]paper {}[/dim]", escape) if cell else "" for cell in cells]
        shown.add_row(*map(escape, labels), *texts)
    lines = [*_notes(table)]
    lines += [f"missing [{number}] {command}" for number, command in _commands(numbers)]
    lines += [f"runs of {where}: {', '.join(sources)}" for where, sources in _runs(table)]
    return Group(Text(table.grid.title, style="bold"), shown, *(Text(line, overflow="fold") for line in lines))


def to_latex(table: Table) -> str:
    """The paper's layout: groups over columns, rules, bold best, italic second, the paper's value small beside ours."""
    grid, numbers = table.grid, _footnotes(table)
    heads = len(grid.suite.heads)
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{'l' * heads}{'r' * len(grid.columns)}}}", r"\toprule"]
    groups = [(group, len(list(columns))) for group, columns in itertools.groupby(column.group for column in grid.columns)]
    if any(group for group, _ in groups):
        spans = [rf"\multicolumn{{{width}}}{{c}}{{{latex_text(group)}}}" for group, width in groups]
        lines.append(" & ".join([*[""] * heads, *spans]) + r" \\")
        ends = list(itertools.accumulate((width for _, width in groups), initial=heads))
        lines.append(" ".join(rf"\cmidrule(l{{3pt}}r{{3pt}}){{{a + 1}-{b}}}" for a, b in itertools.pairwise(ends)))
    labels = [*grid.suite.heads, *(column.label for column in grid.columns)]
    lines += [" & ".join(map(latex_text, labels)) + r" \\", r"\midrule"]
    for row, (texts, cells) in zip(grid.rows, _rows(table), strict=True):
        values = [_beside(cell, LATEX, table, {}, r" {{\scriptsize({})}}") if cell else "" for cell in cells]
        lines += [r"\midrule"] * row.ruled + [" & ".join([*map(latex_text, texts), *values]) + r" \\"]
    caption = latex_text(" ".join([f"{grid.title}.", "In parentheses: the paper's values.", *_notes(table)]))
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", rf"\label{{tab:{grid.suite.name}}}", r"\end{table}"]
    lines += [f"% missing: {command}" for _, command in _commands(numbers)]
    lines += [f"% runs of {where}: {', '.join(sources)}" for where, sources in _runs(table)]
    return "\n".join(lines) + "\n"


def to_csv(table: Table) -> str:
    """One line per cell."""
    file = io.StringIO()
    rows = [*_cells(table)]
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: ";".join(value) if isinstance(value, list) else value for key, value in row.items()})
    return file.getvalue()


def to_json(table: Table) -> str:
    """One object with everything."""
    grid = table.grid
    about = {"table": grid.suite.name, "title": grid.title, "unit": grid.suite.unit, "splits": list(grid.splits)}
    return json.dumps({**about, "notes": list(_notes(table)), "cells": list(_cells(table))}, indent=1) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv, "json": to_json}


def number(value: Value | Printed, style: Style = PLAIN, rank: str = "") -> str:
    """`10.70 ± 2.91` with the mean marked by its rank."""
    pattern = {"best": style.best, "second": style.second}.get(rank, "{}")
    deviation = "" if value.std is None else f"{style.plus_minus}{rounded(value.std)}"
    return f"{pattern.format(rounded(value.mean))}{deviation}"


def latex_text(text: str) -> str:
    """Plain text for LaTeX; the few symbols that labels and notes use become commands."""
    text = re.sub(r"([%&#$_{}])", r"\\\1", text.replace("\\", r"\textbackslash "))
    text = re.sub(r"\bL\\_(PL|Dist|S)\b", r"$\\mathcal{L}_{\1}$", text)
    symbols = {"✓": r"\checkmark", "α": r"$\alpha$", "±": r"$\pm$", "≥": r"$\geq$", "†": r"$^\dag$", "–": "--"}
    for symbol, command in symbols.items():
        text = text.replace(symbol, command)
    return text


def _beside(
    cell: TableCell,
    style: Style,
    table: Table,
    numbers: dict[tuple[str, ...], int],
    paper: str,
    escape: Callable[[str], str] = str,
) -> str:
    """Our value, the number of its footnote where runs are missing, and the paper's value in the pattern `paper`."""
    plain = latex_text if style is LATEX else escape
    text = number(cell.value, style, cell.rank) if cell.value else plain(cell.problem or NOTHING)
    if cell.value and not table.same_n:
        text += style.size.format(len(cell.runs))
    if cell.missing and cell.missing in numbers:
        text += escape(f" [{numbers[cell.missing]}]")
    if (printed := cell.cell.printed) is not None:
        mark = latex_text(printed.mark).replace("*", "$^*$") if style is LATEX else printed.mark.replace("*", r"\*")
        text += paper.format(number(printed, style) + (mark if style is not TERMINAL else printed.mark))
    return text


def _rows(table: Table) -> Iterator[tuple[list[str], tuple[TableCell | None, ...]]]:
    """Labels and cells; a first label without a head names a group and is written once."""
    before = None
    for row, cells in zip(table.grid.rows, table.cells, strict=True):
        labels = list(row.labels)
        if table.grid.suite.heads[0] == "" and labels[0] == before:
            labels[0] = ""
        before = row.labels[0]
        yield labels, cells


def _column_labels(table: Table) -> list[str]:
    return [name_column(column) for column in table.grid.columns]


def _notes(table: Table) -> Iterator[str]:
    yield f"Values are: {table.grid.suite.unit}."
    printed = [cell.cell.printed for row in table.cells for cell in row if cell and cell.cell.printed]
    marks = {value.mark for value in printed}
    yield from ["* generated by FixMatch's authors."] * ("*" in marks) + ["† without CutOut."] * ("†" in marks)
    yield from table.notes
    if not table.same_n:
        yield "Means over fewer splits than others are marked with their n and compete for no mark."


def _footnotes(table: Table) -> dict[tuple[str, ...], int]:
    """Missing commands of each cell -> number; cells with the same commands share it."""
    missing = [cell.missing for row in table.cells for cell in row if cell and cell.missing]
    return {commands: number for number, commands in enumerate(dict.fromkeys(missing), start=1)}


def _commands(numbers: dict[tuple[str, ...], int]) -> list[tuple[int, str]]:
    return [(number, command) for commands, number in numbers.items() for command in commands]


def _named_cells(table: Table) -> Iterator[tuple[str, str, str, TableCell]]:
    """Row, column, setting and cell, of every cell there is."""
    for row, cells in zip(table.grid.rows, table.cells, strict=True):
        for column, label, cell in zip(table.grid.columns, _column_labels(table), cells, strict=True):
            if cell:
                yield name_row(table.grid.suite, row), label, column.setting, cell


def _runs(table: Table) -> Iterator[tuple[str, list[str]]]:
    """For each cell its place and its runs, those of one spec folded: `runs/digits@4/crmatch/split{1,2,3}-seed0`."""
    for row, column, _, cell in _named_cells(table):
        if cell.runs:
            yield f"{row}, {column}", fold_splits(cell.runs)


def fold_splits(sources: Sequence[str]) -> list[str]:
    """Paths that differ only in `splitK`, as one."""
    folded: dict[tuple[str, str], list[str]] = {}
    for source in sources:
        match = re.search(r"(.*split)(\d+)(-seed.*)", source)
        before, split, after = match.groups() if match else (source, "", "")
        folded.setdefault((before, after), []).append(split)
    return [
        f"{before}{splits[0] if len(splits) == 1 else '{' + ','.join(splits) + '}'}{after}"
        for (before, after), splits in folded.items()
    ]


def _cells(table: Table) -> Iterator[dict[str, Any]]:
    """Every cell as plain values."""
    for row, column, setting, cell in _named_cells(table):
        value, printed = cell.value, cell.cell.printed
        specs = cell.cell.specs
        yield {
            "row": row,
            "column": column,
            "setting": setting,
            "recipe": specs[0].recipe,
            "method": specs[0].method.name,
            "headline": specs[0].headline,
            "measure": cell.cell.measure or "error",
            "mean": value.mean if value else None,
            "std": value.std if value else None,
            "n": value.n if value else 0,
            "rank": cell.rank,
            "paper_mean": printed.mean if printed else None,
            "paper_std": printed.std if printed else None,
            "paper_mark": printed.mark if printed else "",
            "problem": cell.problem,
            "runs": list(cell.runs),
            "missing": list(cell.missing),
        }
