"""A filled table as text: for the terminal, Markdown, LaTeX in the paper's layout, CSV, JSON. Imports no torch."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from crmatch.data.spreadsheet import csv_text
from crmatch.paper.results import FilledTable, TableCell, rounded
from crmatch.paper.tables import Row

Footnotes = Mapping[tuple[str, ...], int]
"""The commands of missing runs -> the number of their footnote."""


class Style(NamedTuple):
    """How a format writes a cell: patterns for the best and second best mean, n and the paper's value, and its escapes."""

    best: str
    second: str
    plus_minus: str
    n: str
    paper: str
    escape: Callable[[str], str]


def latex_text(text: str) -> str:
    """Escape plain text for LaTeX; the symbols of labels and notes become commands."""
    text = re.sub(r"([%&#$_{}])", r"\\\1", text.replace("\\", r"\textbackslash "))
    text = re.sub(r"\bL\\_(PL|Dist|S)\b", r"$\\mathcal{L}_{\1}$", text)
    symbols = {
        "✓": r"\checkmark",
        "α": r"$\alpha$",
        "±": r"$\pm$",
        "≥": r"$\geq$",
        "†": r"$^\dag$",
        "‡": r"$^\ddag$",
        "*": "$^*$",
        "–": "--",
    }
    for symbol, command in symbols.items():
        text = text.replace(symbol, command)
    return text


MARKDOWN = Style("**{}**", "*{}*", " ± ", " (n = {})", " (paper {})", lambda text: text.replace("*", r"\*"))
LATEX = Style(r"\textbf{{{}}}", r"\textit{{{}}}", r"$\pm$", "$_{{n={}}}$", r" {{\scriptsize({})}}", latex_text)


def to_markdown(table: FilledTable) -> str:
    """Title, table, notes, commands of missing runs, runs."""
    grid, footnotes = table.grid, _footnotes(table)
    lines = [f"**{grid.title}**", ""]
    lines.append("| " + " | ".join([*grid.table.heads, *(column.name for column in grid.columns)]) + " |")
    lines.append("|" + "---|" * (len(grid.table.heads) + len(grid.columns)))
    for _, labels, cells in _rows(table):
        lines.append("| " + " | ".join([*labels, *(_cell_text(cell, MARKDOWN, table, footnotes) for cell in cells)]) + " |")
    lines += ["", *(f"- {note}" for note in _notes(table))]
    if footnotes:
        lines += ["", "Missing:", "", *(f"- [{number}] `{command}`" for number, command in _commands(footnotes))]
    if runs := list(_runs(table)):
        lines += ["", "<details><summary>Runs behind each cell</summary>", ""]
        lines += [f"- {place}: {', '.join(f'`{source}`' for source in sources)}" for place, sources in runs]
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def to_terminal(table: FilledTable) -> Any:
    """Renderables of rich: the table, the paper's values below ours, then notes, commands of missing runs and runs."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table as RichTable
    from rich.text import Text

    grid, footnotes = table.grid, _footnotes(table)
    style = Style("[bold]{}[/bold]", "[italic]{}[/italic]", " ± ", " (n = {})", "\n[dim]paper {}[/dim]", escape)
    heads = [*grid.table.heads, *(f"{column.group}\n{column.label}".strip() for column in grid.columns)]
    shown = RichTable(*map(escape, heads), pad_edge=False)
    for row, labels, cells in _rows(table):
        if row.ruled:
            shown.add_section()
        shown.add_row(*map(escape, labels), *(_cell_text(cell, style, table, footnotes) for cell in cells))
    lines = [*_notes(table)]
    lines += [f"missing [{number}] {command}" for number, command in _commands(footnotes)]
    lines += [f"runs of {place}: {', '.join(sources)}" for place, sources in _runs(table)]
    return Group(Text(grid.title, style="bold"), shown, *(Text(line, overflow="fold") for line in lines))


def to_latex(table: FilledTable) -> str:
    """The paper's layout: groups above columns, rules, best bold, second best italic, the paper's value small beside ours."""
    grid, heads = table.grid, len(table.grid.table.heads)
    lines = [r"% needs \usepackage{booktabs} and \usepackage{amssymb}", r"\begin{table}", r"\centering"]
    lines += [rf"\begin{{tabular}}{{{'l' * heads}{'r' * len(grid.columns)}}}", r"\toprule"]
    groups = [(group, len(list(columns))) for group, columns in itertools.groupby(column.group for column in grid.columns)]
    if any(group for group, _ in groups):
        spans = [rf"\multicolumn{{{width}}}{{c}}{{{latex_text(group)}}}" for group, width in groups]
        lines.append(" & ".join([*[""] * heads, *spans]) + r" \\")
        ends = list(itertools.accumulate((width for _, width in groups), initial=heads))
        lines.append(" ".join(rf"\cmidrule(l{{3pt}}r{{3pt}}){{{a + 1}-{b}}}" for a, b in itertools.pairwise(ends)))
    labels = [*grid.table.heads, *(column.label for column in grid.columns)]
    lines += [" & ".join(map(latex_text, labels)) + r" \\", r"\midrule"]
    for row, labels, cells in _rows(table):
        texts = [*map(latex_text, labels), *(_cell_text(cell, LATEX, table, {}) for cell in cells)]
        lines += [r"\midrule"] * row.ruled + [" & ".join(texts) + r" \\"]
    compared = any(cell.grid_cell.printed for row in table.cells for cell in row if cell)
    title = grid.title.removeprefix(f"{grid.table.number}: ")  # LaTeX numbers its tables itself
    unused = any(table.never_used(row) for row in range(len(table.cells)))
    marks = " In parentheses: the paper's values." * compared + " ‡: no pseudo-label was ever used." * unused
    caption = latex_text(f"{title[:1].upper()}{title[1:]}.{marks}")
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", rf"\label{{tab:{grid.table.name}}}", r"\end{table}"]
    lines += [f"% {note}" for note in _notes(table)]
    lines += [f"% missing: {command}" for _, command in _commands(_footnotes(table))]
    lines += [f"% runs of {place}: {', '.join(sources)}" for place, sources in _runs(table)]
    return "\n".join(lines) + "\n"


def to_csv(table: FilledTable) -> str:
    """One line per cell."""
    cells = _plain_cells(table)
    return csv_text(
        [{key: ";".join(value) if isinstance(value, list) else value for key, value in cell.items()} for cell in cells]
    )


def to_json(table: FilledTable) -> str:
    """One object with everything."""
    grid = table.grid
    about = {"table": grid.table.name, "title": grid.title, "unit": grid.table.unit, "splits": list(grid.splits)}
    return json.dumps({**about, "notes": list(_notes(table)), "cells": list(_plain_cells(table))}, indent=1) + "\n"


FORMATS: dict[str, Callable[[FilledTable], str]] = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv, "json": to_json}


def _number(mean: float, std: float | None, style: Style, rank: str = "") -> str:
    """Format `10.70 ± 2.91` with the mean marked by its rank."""
    pattern = {"best": style.best, "second": style.second}.get(rank, "{}")
    return pattern.format(rounded(mean)) + ("" if std is None else f"{style.plus_minus}{rounded(std)}")


def _cell_text(cell: TableCell | None, style: Style, table: FilledTable, footnotes: Footnotes) -> str:
    """Our value or the problem, the footnote of missing runs, and the paper's value."""
    if cell is None:
        return ""
    value, printed = cell.value, cell.grid_cell.printed
    text = _number(value.mean, _std(cell), style, cell.rank) if value else style.escape(cell.problem or "–")
    if value and not table.same_n:
        text += style.n.format(len(cell.runs))
    if cell.missing in footnotes:
        text += style.escape(f" [{footnotes[cell.missing]}]")
    if printed is not None:
        text += style.paper.format(_number(printed.mean, printed.std, style) + style.escape(printed.mark))
    return text


def _std(cell: TableCell) -> float | None:
    """The standard deviation; one value has none."""
    return cell.value.std if cell.value and cell.value.n > 1 else None


def _rows(table: FilledTable) -> Iterator[tuple[Row, list[str], tuple[TableCell | None, ...]]]:
    """Each row with its labels and cells. A first label without a heading names a group and is written once."""
    group = None
    for number, (row, cells) in enumerate(zip(table.grid.rows, table.cells, strict=True)):
        labels = list(row.labels)
        labels[-1] += " ‡" * table.never_used(number)
        if table.grid.table.heads[0] == "" and labels[0] == group:
            labels[0] = ""
        group = row.labels[0]
        yield row, labels, cells


def _notes(table: FilledTable) -> Iterator[str]:
    yield f"Values: {table.grid.table.unit}."
    marks = {cell.grid_cell.printed.mark for row in table.cells for cell in row if cell and cell.grid_cell.printed}
    yield from ["* generated by FixMatch's authors."] * ("*" in marks) + ["† without CutOut."] * ("†" in marks)
    if any(table.never_used(row) for row in range(len(table.cells))):
        yield "‡ Pseudo-labels never counted (none was confident enough): rows that only use them differently are equal."
    yield from table.notes
    if not table.same_n:
        yield "Means over fewer splits than others show their n and are not ranked."


def _footnotes(table: FilledTable) -> Footnotes:
    """Number the missing commands of each cell; cells with the same commands share a footnote."""
    missing = dict.fromkeys(cell.missing for row in table.cells for cell in row if cell and cell.missing)
    return {commands: number for number, commands in enumerate(missing, start=1)}


def _commands(footnotes: Footnotes) -> list[tuple[int, str]]:
    return [(number, command) for commands, number in footnotes.items() for command in commands]


def _named_cells(table: FilledTable) -> Iterator[tuple[str, str, str, TableCell]]:
    """Row, column, setting and cell of every cell."""
    for row, cells in zip(table.grid.rows, table.cells, strict=True):
        for column, cell in zip(table.grid.columns, cells, strict=True):
            if cell:
                yield table.grid.table.row_name(row), column.name, column.setting, cell


def _runs(table: FilledTable) -> Iterator[tuple[str, list[str]]]:
    """The place and the runs of each cell."""
    for row, column, _, cell in _named_cells(table):
        if cell.runs:
            yield f"{row}, {column}", fold_splits(cell.runs)


def fold_splits(sources: Sequence[str]) -> list[str]:
    """Write paths that differ only in their split as one: `runs/digits@4/crmatch/split{1,2,3}-seed0`."""
    folded: dict[tuple[str, str], list[str]] = {}
    for source in sources:
        match = re.search(r"(.*split)(\d+)(-seed.*)", source)
        before, split, after = match.groups() if match else (source, "", "")
        folded.setdefault((before, after), []).append(split)
    return [
        f"{before}{splits[0] if len(splits) == 1 else '{' + ','.join(splits) + '}'}{after}"
        for (before, after), splits in folded.items()
    ]


def _plain_cells(table: FilledTable) -> Iterator[dict[str, Any]]:
    """Every cell as plain values."""
    for row, column, setting, cell in _named_cells(table):
        value, printed, spec = cell.value, cell.grid_cell.printed, cell.grid_cell.specs[0]
        yield {
            "row": row,
            "column": column,
            "setting": setting,
            "recipe": spec.recipe,
            "method": spec.method.name,
            "headline": spec.headline,
            "measure": cell.grid_cell.measure or "error",
            "mean": value.mean if value else None,
            "std": _std(cell),
            "n": value.n if value else 0,
            "rank": cell.rank,
            "paper_mean": printed.mean if printed else None,
            "paper_std": printed.std if printed else None,
            "paper_mark": printed.mark if printed else "",
            "problem": cell.problem,
            "pseudo_labels_used": cell.pseudo_labels_used,
            "runs": list(cell.runs),
            "missing": list(cell.missing),
        }
