"""Tables from hand-made records with distinct values: rounding, marks, missing cells, different n, mixed records."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from made_records import TEMPLATE
from rich.console import Console

from crmatch.atomic_files import write_json
from crmatch.data.settings import parse_setting
from crmatch.errors import DataError, RequestError
from crmatch.paper.formats import FORMATS, fold_splits, latex_text, to_csv, to_json, to_latex, to_markdown, to_terminal
from crmatch.paper.grid import Grid, Overrides, find_table, make_grid
from crmatch.paper.results import FilledTable, Run, analysis_file, fill, records_in, rounded
from crmatch.runs.record import Errors, RunRecord
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, replace


def record(spec: RunSpec, error: float, **changes: Any) -> RunRecord:
    """All errors differ, so that a wrong one in a table is seen."""
    headline = {"last": error + 50, "median_last_20": error + 50, "best_on_test": 0.01} | {spec.headline: error}
    errors = {"ema": Errors(**headline), "raw": Errors(last=77.0, median_last_20=78.0, best_on_test=0.02)}
    return TEMPLATE.model_copy(update={"spec": spec, "numerics": 1, "evaluated": "ema", **errors, **changes})


def table_of(grid: Grid, errors: Mapping[tuple[int, int], list[float]], **changes: Any) -> FilledTable:
    """A table with the given errors (one per split) at (row, column)."""
    runs: dict[RunSpec, Run] = {}
    for (row, column), values in errors.items():
        cell = grid.cells[row][column]
        assert cell is not None
        for spec, error in zip(cell.specs, values, strict=False):
            runs[spec] = Run(record(spec, error, **changes), f"runs/r{row}c{column}/split{spec.split}-seed0")
    return fill(grid, runs.get)


def grid_of(name: str, **overrides: Any) -> Grid:
    return make_grid(find_table(name), Overrides(**{"setting": "digits@4", **overrides}))


@pytest.mark.parametrize(
    ("value", "text"),
    [(10.015, "10.02"), (2.675, "2.68"), (0.125, "0.13"), (3.1449, "3.14"), (5.0, "5.00"), (9.995, "10.00")],
)
def test_values_are_rounded_half_up_to_two_decimals(value: float, text: str) -> None:
    assert rounded(value) == text


def test_a_cell_is_mean_and_standard_deviation_with_n_minus_1() -> None:
    table = table_of(grid_of("ablation", splits=(1, 2, 3)), {(0, 0): [4.6, 3.4, 2.8]})
    assert table.cells[0][0] is not None
    assert table.cells[0][0].value == pytest.approx((3.6, 0.916515, 3))
    assert "|  |  | **3.60** ± 0.92 (paper 46.22) |" in to_markdown(table)
    assert "|  |  | **4.60** (paper 46.22) |" in to_markdown(table_of(grid_of("ablation"), {(0, 0): [4.6]}))


@pytest.mark.parametrize("rule", ["last", "median_last_20"])
def test_each_record_enters_with_its_headline_error_and_never_with_the_best_on_test(rule: str) -> None:
    table = table_of(grid_of("ablation", changes={"headline": rule}), {(0, 0): [12.5]})
    assert table.cells[0][0] is not None
    assert table.cells[0][0].value == (12.5, 0.0, 1)


def test_a_run_without_a_test_error_is_refused() -> None:
    with pytest.raises(RequestError, match=r"digits@4 has no test error\.\nTables need a test set"):
        table_of(grid_of("ablation"), {(0, 0): [1.0]}, ema=None, raw=None)


def test_the_best_is_bold_and_ties_as_printed_share_the_mark() -> None:
    table = table_of(grid_of("ablation"), {(0, 0): [3.001], (1, 0): [2.004], (2, 0): [1.996], (3, 0): [4.0]})
    assert [cells[0].rank for cells in table.cells if cells[0]] == ["", "best", "best", ""]
    text = to_markdown(table)
    assert "| ✓ |  | **2.00** (paper 41.48) |" in text
    assert "|  |  | 3.00 (paper 46.22) |" in text


def test_the_second_best_is_italic_in_main_tables_with_ties() -> None:
    grid = grid_of("small-network", splits=(1,))
    grid = grid._replace(table=grid.table._replace(second=True))
    table = table_of(grid, {(0, 0): [5.05], (1, 0): [5.07], (2, 0): [5.0701]})
    assert [cells[0].rank for cells in table.cells if cells[0]] == ["best", "second", "second"]
    table = table_of(grid, {(0, 0): [5.05], (1, 0): [5.051], (2, 0): [5.08]})
    assert [cells[0].rank for cells in table.cells if cells[0]] == ["best", "best", "second"]
    assert "| FixMatch (RA) | large | *5.08* (paper 48.85 ± 1.75) |" in to_markdown(table)


def test_marks_are_per_column_or_over_the_whole_table_as_in_the_paper() -> None:
    pairs = table_of(grid_of("pairs"), {(row, column): [row + column + 1.0] for row in range(3) for column in range(2)})
    assert [[cell.rank for cell in row if cell] for row in pairs.cells] == [["best", "best"], ["", ""], ["", ""]]
    whole = table_of(grid_of("projection"), {(0, 0): [3.0], (0, 1): [2.0], (0, 2): [5.0], (1, 1): [4.0], (2, 1): [6.0]})
    assert [[cell.rank if cell else None for cell in row] for row in whole.cells] == [
        ["", "best", ""], ["", "", ""], [None, "", None],
    ]  # fmt: skip
    plain = table_of(grid_of("threshold"), {(0, 0): [1.0], (1, 0): [2.0]})
    assert {cell.rank for row in plain.cells for cell in row if cell} == {""}


def test_missing_cells_show_the_commands_that_fill_them() -> None:
    grid = grid_of("ablation", splits=(1, 2))
    text = to_markdown(table_of(grid, {(3, 0): [3.5, 2.5], (1, 0): [4.0]}))
    assert "|  |  | – [1] (paper 46.22) |" in text
    assert "- [1] `crmatch train digits@4 --set method.feature_distance_weight=0.0 --set method.rotation_weight=0.0`" in text
    assert "- [2] `crmatch train digits@4 --split 2 --set method.rotation_weight=0.0`" in text
    assert "crmatch train digits@4`" not in text
    options = fill(grid, lambda spec: None, options=["--out", "my runs"])
    assert "`crmatch train digits@4 --split 2 --out 'my runs'`" in to_markdown(options)


def test_a_mean_over_fewer_splits_shows_its_n_and_does_not_win() -> None:
    table = table_of(grid_of("ablation", splits=(1, 2, 3)), {(0, 0): [1.0], (1, 0): [3.0, 4.0, 5.0], (3, 0): [5.0, 6.0, 7.0]})
    text = to_markdown(table)
    assert "|  |  | 1.00 (n = 1) [1] (paper 46.22) |" in text
    assert "|  | ✓ | **4.00** ± 1.00 (n = 3) (paper 43.48) |" in text
    assert "are not ranked" in text
    full = to_markdown(table_of(grid_of("pairs", splits=(1, 2)), {(r, c): [1.0, 2.0] for r in range(3) for c in range(2)}))
    assert "n = 2" in full.splitlines()[0]
    assert "(n = " not in "\n".join(full.splitlines()[1:])


def test_runs_on_different_images_are_refused_and_mixed_numerics_are_reported() -> None:
    grid = grid_of("ablation")
    runs = {spec: Run(record(spec, 1.0 + number), f"r{number}") for number, spec in enumerate(grid.specs)}
    other = grid.specs[1]
    changed = {**runs, other: Run(record(other, 9.0, data_fingerprint="g"), "r1")}
    with pytest.raises(RequestError, match=r"r0 and r1 were trained on different images of digits@4\.\n.*--fresh"):
        fill(grid, changed.get)
    newer = {**runs, other: Run(record(other, 9.0, numerics=2), "r1")}
    assert "MIXED NUMERICS 1, 2" in fill(grid, newer.get).notes[-1]
    assert fill(grid, runs.get).notes[-1] == "Numerics 1."


def test_diverged_runs_are_shown_as_such() -> None:
    grid = grid_of("ablation", unprinted_rows=True)
    problems = {grid.specs[5]: "diverged: loss is nan at step 7"}
    table = fill(grid, lambda spec: None, problems=problems)
    assert "| ✓ | ✓ without L_S | diverged: loss is nan at step 7 [6] |" in to_markdown(table)
    assert [row["problem"] for row in json.loads(to_json(table))["cells"]][5] == "diverged: loss is nan at step 7"


def test_main_tables_say_whose_error_is_which() -> None:
    grid = make_grid(find_table("small-network"), Overrides(splits=(1,)))
    notes = " ".join(fill(grid, lambda spec: None).notes)
    assert "final model (Method CR-Match, Network small, Method CR-Match, Network large)" in notes
    assert "median of the last 20 evaluations (Method FixMatch (RA), Network large)" in notes


def test_json_and_csv_hold_every_cell_with_its_runs() -> None:
    table = table_of(grid_of("projection", splits=(1, 2)), {(0, 1): [3.25, 4.25], (2, 1): [5.0]})
    cells = {(cell["row"], cell["column"]): cell for cell in json.loads(to_json(table))["cells"]}
    assert len(cells) == 7
    one = cells["(a)", "feature + linear"]
    assert (one["mean"], one["n"], one["paper_mean"], one["rank"]) == (3.75, 2, 45.52, "best")
    assert one["std"] == pytest.approx(0.7071068)
    assert one["runs"] == ["runs/r0c1/split1-seed0", "runs/r0c1/split2-seed0"]
    without = cells["(a), without threshold", "feature + linear"]
    assert len(without["runs"]) == len(without["missing"]) == 1
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [row["mean"] for row in rows] == ["", "3.75", "", "", "", "", "5.0"]
    assert rows[1]["runs"] == "runs/r0c1/split1-seed0;runs/r0c1/split2-seed0"


def test_latex_has_the_papers_layout() -> None:
    grid = make_grid(find_table("ablation"))
    text = to_latex(table_of(grid, {(3, 1): [10.0], (1, 1): [11.0]}))
    assert r"\begin{tabular}{llrrrr}" in text
    assert r"RotNet & FeatDistLoss & MiniImageNet@40 & CIFAR10@4 & CIFAR100@4 & SVHN@4 \\" in text
    assert r"\checkmark & \checkmark & -- {\scriptsize(33.82)} & \textbf{10.00} {\scriptsize(10.92)}" in text
    assert "% missing: crmatch train svhn@4 --recipe paper\n" in text
    assert "% runs of RotNet ✓, FeatDistLoss ✓, CIFAR10@4: runs/r3c1/split1-seed0" in text
    grouped = grid_of("pairs")
    columns = tuple(column._replace(group="CIFAR-100") for column in grouped.columns)
    text = to_latex(table_of(grouped._replace(columns=columns), {(0, 0): [1.5]}))
    assert r" & \multicolumn{2}{c}{CIFAR-100} \\" in text
    assert r"\cmidrule(l{3pt}r{3pt}){2-3}" in text
    assert text.count(r"\midrule") == 1


def test_latex_escapes_what_labels_hold() -> None:
    assert latex_text("50 % & a_b") == r"50 \% \& a\_b"
    assert latex_text("+ L_PL + L_Dist, ±") == r"+ $\mathcal{L}_{PL}$ + $\mathcal{L}_{Dist}$, $\pm$"


def test_the_terminal_shows_ours_above_the_papers() -> None:
    console = Console(width=120, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(to_terminal(table_of(grid_of("distances"), {(0, 0): [3.5], (6, 0): [4.5]})))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1m3.50\x1b[0m" in text
    assert "paper 45.52" in text
    assert text.count("Impose equivariance │") == 1
    assert "missing [1] crmatch train digits@4 --set method.distance=l2" in text


@pytest.mark.parametrize("name", ["ablation", "pairs", "equivariance", "feature-distances", "weights"])
@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_shows_empty_tables(name: str, format_: str) -> None:
    assert "crmatch train digits@4" in FORMATS[format_](fill(grid_of(name), lambda spec: None))


def keep_records(folder: Path, grid: Grid, analysis: str, values: Mapping[str, tuple[float, float, int]]) -> None:
    """A record and the output of an analysis for every run; means rise by 10 from split to split."""
    for number, spec in enumerate(grid.specs):
        write_json(folder / f"{number}.json", record(spec, 5.0).model_dump(mode="json"))
        results = {name: {"mean": mean + 10 * (spec.split - 1), "std": std, "n": n} for name, (mean, std, n) in values.items()}
        write_json(folder / f"{number}.{analysis}.json", {"run": "x", **results})


def test_cells_of_analyses_come_from_their_files_beside_the_records(tmp_path: Path) -> None:
    values = {"weak-original": (0.5, 0.01, 18), "strong-original": (0.625, 0.01, 18), "weak-strong": (0.75, 0.01, 18)}
    grid = grid_of("feature-distances")
    keep_records(tmp_path, grid, "distances", values)
    text = to_markdown(fill(grid, records_in(tmp_path)))
    assert "| cos(f(A(u)), f(u)) | 0.63 ± 0.01 (paper 0.90 ± 0.06) | 0.63 ± 0.01 (paper 0.84 ± 0.06) |" in text
    several = grid_of("feature-distances", splits=(1, 2))
    keep_records(tmp_path, several, "distances", values)
    cell = fill(several, records_in(tmp_path)).cells[0][0]
    assert cell is not None
    assert cell.value == pytest.approx((5.5, 7.0710678, 2))
    (tmp_path / "0.distances.json").unlink()
    command = f"crmatch distances {tmp_path}/0.json --json > {tmp_path}/0.distances.json"
    assert f"- [1] `{command}`" in to_markdown(fill(grid, records_in(tmp_path)))
    write_json(tmp_path / "0.distances.json", {"weak-original": 3})
    with pytest.raises(DataError, match=r"has no 'weak-original' with mean, std and n\.\n.*crmatch distances "):
        fill(grid, records_in(tmp_path))
    assert str(analysis_file("runs/x", "probe")) == "runs/x/probe.json"


def test_records_are_found_by_what_they_say_not_by_their_names(tmp_path: Path) -> None:
    spec = recipe(parse_setting("digits@4"))
    write_json(tmp_path / "a" / "x.json", record(spec, 3.0).model_dump(mode="json"))
    found = records_in(tmp_path)(spec)
    assert found is not None
    assert found.record.error == 3.0
    assert records_in(tmp_path)(replace(spec, split=2)) is None
    assert records_in(tmp_path)(replace(spec, **{"method.clamp": False})) is None
    write_json(tmp_path / "b.json", record(spec, 4.0).model_dump(mode="json"))
    with pytest.raises(DataError, match=r"are records of one run with different errors\.\nRemove one"):
        records_in(tmp_path)
    with pytest.raises(DataError, match="nowhere is not a directory"):
        records_in(tmp_path / "nowhere")
    write_json(tmp_path / "b.json", {"spec": 3})
    with pytest.raises(DataError, match=r"b\.json is .* run record"):
        records_in(tmp_path)


def test_runs_of_one_spec_are_written_once() -> None:
    assert fold_splits(["r/a/split1-seed0", "r/a/split2-seed0", "r/b/split2-seed0"]) == [
        "r/a/split{1,2}-seed0",
        "r/b/split2-seed0",
    ]
    assert fold_splits(["elsewhere"]) == ["elsewhere"]
