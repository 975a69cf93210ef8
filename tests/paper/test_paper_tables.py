"""Every table of the paper: its rows, columns and printed values, and the keys that each cell changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from crmatch.data.settings import parse_setting
from crmatch.errors import RequestError
from crmatch.paper.grid import Grid, Overrides, find_table, make_grid, parse_splits
from crmatch.paper.tables import PAPER_TABLES
from crmatch.runs.cost import DAY, duration, estimate, images_per_step, network_layers
from crmatch.runs.directory import changed_keys, train_command
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, parse_spec, replace

TABLES = {  # issue 7: the paper's and its appendix's tables
    "Table 1": "main-cifar", "Table 2 left": "main-svhn-stl", "Table 2 right": "main-mini", "Table 3": "ablation",
    "Table 4 left": "distances", "Table 4 right": "equivariance", "Table 5": "pairs", "Table 6": "projection",
    "Appendix B": "feature-distances", "Appendix E": "threshold", "Appendix F": "weights", "Section 4.1": "small-network",
    "Sources of appendix": "components",
}  # fmt: skip
WRN_28_2 = {"network.filters": 32}
ALL_METHODS = {
    "Mean Teacher": "mean_teacher", "MixMatch": "mixmatch", "UDA": "uda", "ReMixMatch": "remixmatch",
    "FixMatch (RA)": "fixmatch", "FixMatch (CTA)": "fixmatch", "FeatMatch": "featmatch", "CR-Match": "crmatch",
    "Label Propagation": "label_propagation", "PLCB": "plcb",
}  # fmt: skip
NO_ROT, NO_DIST = {"method.rotation_weight": 0.0}, {"method.feature_distance_weight": 0.0}
PULL = {"method.direction": "invariance"}


def grid_of(name: str, **overrides: Any) -> Grid:
    return make_grid(find_table(name), Overrides(**overrides))


def changes(grid: Grid) -> list[list[dict[str, Any] | None]]:
    """What each cell changes of its setting's recipe."""
    return [[cell and changed_keys(cell.specs[0], grid.settings[cell.specs[0].setting]) for cell in row] for row in grid.cells]


def printed(grid: Grid) -> list[list[float | None]]:
    return [[cell.printed.mean if cell and cell.printed else None for cell in row] for row in grid.cells]


def test_every_table_of_the_paper_is_here() -> None:
    assert {table.number: name for name, table in PAPER_TABLES.items()} == TABLES


MAIN = {
    "main-cifar": (
        ["cifar10@4", "cifar10@25", "cifar10@400", "cifar100@4", "cifar100@25", "cifar100@100"],
        {
            "Mean Teacher": "- 32.32±2.30* 9.19±0.19* - 53.91±0.57* 35.83±0.24*",
            "MixMatch": "47.54±11.50* 11.08±0.87 6.24±0.06 67.61±1.32* 39.94±0.37* 25.88±0.30",
            "UDA": "29.05±5.93* 5.43±0.96 4.32±0.08* 59.28±0.88* 33.13±0.22* 24.50±0.25*",
            "ReMixMatch": "19.10±9.64* 6.27±0.34 5.14±0.04 44.28±2.06* 27.43±0.31* 23.03±0.56*",
            "FixMatch (RA)": "13.81±3.37 5.07±0.65 4.26±0.05 48.85±1.75 28.29±0.11 22.60±0.12",
            "FixMatch (CTA)": "11.39±3.35 5.07±0.33 4.31±0.15 49.95±3.01 28.64±0.24 23.18±0.11",
            "FeatMatch": "- 6.00±0.41 4.64±0.11 - - -",
            "CR-Match": "10.70±2.91 5.05±0.12 3.96±0.16 39.45±1.69 25.43±0.14 20.40±0.08",
        },
    ),
    "main-svhn-stl": (
        ["stl10@100", "svhn@4", "svhn@25", "svhn@100"],
        {
            "Mean Teacher": "21.34±2.39* - 3.57±0.11* 3.42±0.07*",
            "MixMatch": "10.18±1.46 42.55±14.53* 3.78±0.26 3.27±0.31",
            "UDA": "7.66±0.56* 52.63±20.51* 2.72±0.40 2.23±0.07",
            "ReMixMatch": "6.18±1.24 3.34±0.20* 3.10±0.50 2.83±0.30",
            "FixMatch (RA)": "7.98±1.50 3.96±2.17 2.48±0.38 2.28±0.11",
            "FixMatch (CTA)": "5.17±0.63 7.65±7.65 2.64±0.64 2.36±0.19",
            "FeatMatch": "- - 3.34±0.19† 3.10±0.06†",
            "CR-Match": "4.89±0.17 2.79±0.93 2.35±0.29 2.08±0.07",
        },
    ),
    "main-mini": (
        ["mini_imagenet@40", "mini_imagenet@100"],
        {
            "Mean Teacher": "72.51±0.22 57.55±1.11",
            "Label Propagation": "70.29±0.81 57.58±1.47",
            "PLCB": "56.49±0.51 46.08±0.11",
            "FeatMatch": "39.05±0.06 34.79±0.22",
            "CR-Match": "34.87±0.99 32.58±1.60",
        },
    ),
}


@pytest.mark.parametrize("name", MAIN)
def test_main_tables_have_the_papers_rows_columns_and_five_splits(name: str) -> None:
    settings, values = MAIN[name]
    grid = grid_of(name)
    assert [column.setting for column in grid.columns] == settings
    assert [row.labels for row in grid.rows] == [(method,) for method in values]
    for row, cells in zip(grid.rows, grid.cells, strict=True):
        for setting, cell, text in zip(settings, cells, values[row.labels[0]].split(), strict=True):
            assert cell is not None
            base = recipe(parse_setting(setting), ALL_METHODS[row.labels[0]], "paper")
            policy = {"augmentation.policy": "ctaugment"} if row.labels[0] == "FixMatch (CTA)" else {}
            assert [spec.split for spec in cell.specs] == [1, 2, 3, 4, 5]
            assert changed_keys(cell.specs[0], parse_setting(setting)) == policy
            assert cell.specs[0].model_copy(update={"augmentation": base.augmentation}) == base
            value = cell.printed
            assert text == (f"{value.mean:.2f}±{value.std:.2f}{value.mark}" if value else "-")
    assert grid.table.second
    assert "the paper's settings, splits 1-5 (n = 5)" in grid.title


ANALYSES: dict[str, tuple[list[list[dict[str, Any] | None]], list[list[float | None]]]] = {
    "distances": (
        [[{}], [{"method.distance": "l2"}], [{"method.distance": "js"}], [PULL], [{"method.distance": "l2"} | PULL],
         [{"method.distance": "js"} | PULL], [NO_DIST]],
        [[45.52], [46.22], [46.46], [46.98], [48.74], [47.48], [48.89]],
    ),
    "pairs": (
        [[{"method.pair": "weak-weak"} | PULL, {"method.pair": "weak-weak"}], [PULL, {}],
         [{"method.pair": "strong-strong"} | PULL, {"method.pair": "strong-strong"}]],
        [[48.88, 48.51], [46.98, 45.52], [48.57, 48.05]],
    ),
    "projection": (
        [[{"method.projection": "none"}, {}, {"method.projection": "mlp"}],
         [{"method.feature_point": "b", "method.projection": "none"}, {"method.feature_point": "b"},
          {"method.feature_point": "b", "method.projection": "mlp"}],
         [None, {"method.distance_uses_threshold": False}, None]],
        [[48.37, 45.52, 47.52], [47.37, 46.10, 47.15], [None, 46.94, None]],
    ),
    "weights": (
        [[{"method.unlabeled_weight": 0.1}, {"method.feature_distance_weight": 0.1}],
         [{"method.unlabeled_weight": 5.0}, {"method.feature_distance_weight": 5.0}], [{}, {}],
         [{"method.rotation_weight": 0.1}, {"method.rotation_weight": 0.1}]],
        [[47.85, 47.85], [47.66, 47.66], [45.52, 45.52], [46.73, 46.73]],
    ),
    "threshold": (
        [[{"method.threshold": 0.9}], [{"method.threshold": 0.92}], [{}], [{"method.threshold": 0.97}],
         [{"method.threshold": 0.99}]],
        [[None]] * 5,
    ),
    "components": (
        [[{"method.unlabeled_weight": 0.0} | NO_ROT, {"method.unlabeled_weight": 0.0}], [NO_DIST | NO_ROT, NO_DIST],
         [PULL | NO_ROT, PULL], [NO_ROT, {}]],
        [[91.66, None], [48.89, 48.89], [46.98, 46.98], [45.52, 45.52]],
    ),
    "equivariance": (
        [[{}, PULL]] * 5, [[33.22, 36.80], [11.09, 14.87], [15.05, 21.92], [31.04, 35.99], [0.27, 46.18]],
    ),
    "feature-distances": ([[PULL, {}]] * 3, [[0.97, 0.96], [0.90, 0.84], [0.90, 0.85]]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANALYSES)
def test_analyses_change_one_thing_each_on_cifar100_with_the_small_network(name: str) -> None:
    grid = grid_of(name)
    wanted, values = ANALYSES[name]
    assert changes(grid) == [[None if keys is None else keys | WRN_28_2 for keys in row] for row in wanted]
    assert printed(grid) == values
    assert {(spec.setting, spec.recipe, spec.split) for spec in grid.specs} == {("cifar100@4", "paper", 1)}
    assert {spec.method.name for spec in grid.specs} == {"crmatch"}


def test_the_ablation_removes_rotation_and_feature_distance_on_four_settings() -> None:
    grid = grid_of("ablation", unprinted_rows=True)
    assert [column.setting for column in grid.columns] == ["mini_imagenet@40", "cifar10@4", "cifar100@4", "svhn@4"]
    rows = [NO_DIST | NO_ROT, NO_ROT, NO_DIST, {}, {"method.pseudo_label_weight": 0.0}, {"method.supervised_weight": 0.0}]
    assert changes(grid) == [[keys] * 4 for keys in rows]
    assert printed(grid)[:4] == [
        [35.13, 11.86, 46.22, 2.42], [34.14, 10.33, 43.48, 2.34], [34.64, 11.27, 41.48, 2.21], [33.82, 10.92, 39.22, 2.09],
    ]  # fmt: skip
    assert len(grid_of("ablation").rows) == 4


def test_the_small_network_stands_beside_the_large_ones() -> None:
    grid = grid_of("small-network")
    assert changes(grid) == [[WRN_28_2], [{}], [{}]]
    assert [spec.method.name for spec in grid.specs[:3]] == ["crmatch", "crmatch", "fixmatch"]
    assert printed(grid) == [[46.05], [39.45], [48.85]]
    scaled = grid_of("small-network", setting="digits@4")
    assert changes(scaled) == [[{"network.filters": 8}], [{}], [{}]]
    with pytest.raises(RequestError, match=r"needs a network with network.filters; mini_imagenet@40 has resnet18"):
        grid_of("small-network", setting="mini_imagenet@40")


def test_rows_of_the_sources_are_added_by_unprinted() -> None:
    rows = [(row.labels, row.values[0]) for row in grid_of("weights", unprinted_rows=True).rows[4:]]
    assert [(labels, value.mean) for labels, value in rows if value] == [
        (("5", "1"), 56.91), (("10", "1"), 60.15), (("1", "10"), 44.71), (("0.5", "1"), 46.73), (("1", "0.5"), 46.68),
    ]  # fmt: skip
    with pytest.raises(RequestError, match=r"--unprinted adds nothing to pairs\.\nTables with such rows: ablation, weights"):
        grid_of("pairs", unprinted_rows=True)


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_every_table_scales_down_to_digits_and_says_so(name: str) -> None:
    grid = grid_of(name, setting="digits@4", steps=50, splits=(1, 2, 3))
    assert all(part in grid.title for part in ("digits@4", "recipe quick", "50 steps", "splits 1-3 (n = 3)"))
    assert {spec.setting for spec in grid.specs} == {"digits@4"}
    assert {spec.network.model_dump().get("filters") for spec in grid.specs} <= {32, 8}
    assert [spec.split for spec in grid.specs] == sorted(spec.split for spec in grid.specs)
    settings = {column.setting for column in find_table(name).columns}
    assert len(grid.columns) == (1 if len(settings) > 1 else len(find_table(name).columns))


def test_beside_another_setting_stand_the_papers_values_of_the_same_set_else_of_its_analyses() -> None:
    assert printed(grid_of("ablation", setting="svhn@25")) == [[2.42], [2.34], [2.21], [2.09]]
    assert "for svhn@4" in grid_of("ablation", setting="svhn@25").notes[-1]
    assert printed(grid_of("ablation", setting="digits@4"))[3] == [39.22]
    assert printed(grid_of("main-mini", setting="digits@4")) == [[None]] * 5
    assert printed(grid_of("ablation", setting="cifar10@4"))[0] == [11.86]
    assert grid_of("pairs", setting="cifar100@4").specs == grid_of("pairs").specs


def test_keys_for_all_runs_reach_every_method_that_has_them() -> None:
    grid = grid_of("main-cifar", setting="digits@4", splits=(1,), changes={"method.clamp": False, "plan.log_every": 7})
    clamped = {spec.method.name: spec.method.model_dump().get("clamp") for spec in grid.specs}
    assert clamped["crmatch"] is False
    assert clamped["mixmatch"] is None
    assert {spec.plan.log_every for spec in grid.specs} == {7}
    assert "method.clamp=False" in grid.title


def test_a_key_asked_for_comes_before_the_network_of_the_paper_s_analyses() -> None:
    (filters,) = {spec.network.model_dump()["filters"] for spec in grid_of("distances", changes={"network.filters": 16}).specs}
    assert filters == 16


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("method.threshold", r"--set method\.threshold: the rows or columns of threshold differ in it\.\nLeave it out"),
        ("method.nonsense", r"unknown key 'method\.nonsense'"),
        ("plan.steps", r"--set plan\.steps .*\nUse --setting"),
        ("plan.nonsense", r"unknown key 'plan\.nonsense'"),
    ],
)
def test_keys_that_make_no_sense_for_a_table_are_refused(key: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        grid_of("threshold", changes={key: 1})


@pytest.mark.parametrize(("text", "splits"), [("1-5", (1, 2, 3, 4, 5)), ("2", (2,)), ("1,3", (1, 3)), ("2,1-3", (2, 1, 3))])
def test_splits_are_read_as_people_write_them(text: str, splits: tuple[int, ...]) -> None:
    assert parse_splits(text) == splits


@pytest.mark.parametrize("text", ["0", "5-1", "a", "", "1-", "1-101"])
def test_other_splits_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"splits from 1 to 100\.\nWrite 1-5"):
        parse_splits(text)


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_the_command_of_every_run_makes_exactly_that_run(name: str) -> None:
    """Read the command as `crmatch train` does."""
    grid = grid_of(name, splits=(2,))
    for spec in grid.specs:
        assert command_spec(train_command(spec, grid.settings[spec.setting])) == spec


def command_spec(command: str) -> RunSpec:
    import shlex

    from crmatch.cli.options import make_spec, read_changes

    words = shlex.split(command)
    assert words[:2] == ["crmatch", "train"]
    options: dict[str, list[str]] = {}
    for option, value in zip(words[3::2], words[4::2], strict=True):
        options.setdefault(option, []).append(value)
    named = {"plan.steps": options.get("--steps"), "split": options.get("--split")}
    changed = read_changes(None, options.get("--set"), {key: int(value[0]) for key, value in named.items() if value})
    return make_spec(words[2], options.get("--method", ["crmatch"])[0], options.get("--recipe", [None])[0], None, changed)


def test_costs_agree_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as measured
    digits, cifar = (recipe(parse_setting(name), "crmatch") for name in ("digits@4", "cifar10@4"))
    assert (images_per_step(digits), images_per_step(cifar)) == (104, 2304)
    assert images_per_step(recipe(parse_setting("cifar10@4"), "fixmatch")) == 960
    usb = recipe(parse_setting("cifar10@4"), "crmatch", "usb")
    assert images_per_step(usb) == 1216
    small, large = estimate(digits, parse_setting("digits@4")), estimate(cifar, parse_setting("cifar10@4"))
    assert small.cpu_seconds == pytest.approx(1200 * 0.028, rel=0.02)
    assert [duration(seconds) for seconds in (45, 700, 5.2 * 3600, 3.1 * DAY, 237.4 * DAY, 2e9)] == [
        "45 s", "12 min", "5.2 h", "3.1 days", "237 days", "63 years",
    ]  # fmt: skip
    assert large.cpu_seconds == pytest.approx(39 * 524_288, rel=0.02)
    assert estimate(usb, parse_setting("cifar10@4")).memory_bytes == pytest.approx(3.1e9, rel=0.03)
    assert estimate(usb, parse_setting("cifar10@4"), "kept").memory_bytes == pytest.approx(5.4e9, rel=0.03)
    assert large.memory_bytes == pytest.approx(5.44e9, rel=0.03)
    svhn = replace(recipe(parse_setting("svhn@25"), "crmatch", "quick"), **{"data.image_size": 24})
    seconds = estimate(svhn, parse_setting("svhn@25")).cpu_seconds
    assert seconds == pytest.approx(1000 * 0.067, rel=0.02)


@pytest.mark.parametrize(
    ("setting", "weights"), [("cifar10@4", 1.46e6), ("cifar100@4", 26e6), ("stl10@100", 5.9e6), ("mini_imagenet@40", 11.2e6)]
)
def test_the_layers_behind_the_estimate_are_those_of_the_networks(setting: str, weights: float) -> None:
    spec = recipe(parse_setting(setting))
    assert sum(layer.weights for layer in network_layers(spec.network, 3, 32)) == pytest.approx(weights, rel=0.01)
    assert parse_spec(spec.to_json()) == spec


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_the_docs_give_the_runs_days_and_memory_of_every_table(name: str) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reproduce.md").read_text()
    row = next(line for line in text.splitlines() if f"| `crmatch table {name}` |" in line)
    runs, days, memory = (float(cell.replace(",", "")) for cell in row.split("|")[3:6])
    grid = grid_of(name)
    costs = [estimate(spec, grid.settings[spec.setting]) for spec in grid.specs]
    assert runs == len(costs)
    assert days == pytest.approx(sum(cost.gpu_seconds or 0 for cost in costs) / 86_400, rel=0.02, abs=0.5)
    assert memory == pytest.approx(max(cost.memory_bytes for cost in costs) / 1e9, rel=0.02, abs=0.5)


FIGURES = [  # issue 7: every figure of the paper and its appendix
    "crmatch figure teaser", "crmatch show augmentations", "figure2.svg", "crmatch figure tsne", "crmatch figure curves",
    "crmatch figure threshold", "crmatch show augmentations --table", "crmatch report",
]  # fmt: skip


def test_the_docs_give_the_command_of_every_table_and_figure_and_the_printed_numbers() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    text = (docs / "reproduce.md").read_text()
    assert (docs / "figure2.svg").is_file()
    assert not [name for name in PAPER_TABLES if f"`crmatch table {name}`" not in text]
    assert set(re.findall(r"`crmatch table ([a-z-]+)", text)) == set(PAPER_TABLES)
    assert not [command for command in FIGURES if command not in text]
    for name in set(PAPER_TABLES) - {"main-cifar", "main-svhn-stl", "main-mini"}:
        table = find_table(name)
        values = [value for row in (*table.rows, *table.unprinted_rows) for value in row.values if value]
        absent = [value for value in values if f"{value.mean:.2f}".removeprefix("0") not in text]
        assert not absent, f"{name}: {absent}"
