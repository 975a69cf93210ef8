"""Rules about the source itself: one direction of imports, one loop, no pickle, light descriptions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "crmatch"
ORDER = (
    "errors", "stopping", "files", "frozen", "randomness", "processes", "data", "augment", "networks", "losses", "methods",
    "training", "evaluation", "collapse", "config", "recipes", "costs", "memory", "results", "continuing", "model_card",
    "experiment", "tensorboard", "inference", "prediction", "export", "analysis", "beliefs", "suites", "grid", "engines",
    "ray_engine", "display", "table_progress", "report", "estimator_inputs", "estimator", "cli_options", "cli_show", "cli_data",
    "cli_table", "cli_figure", "cli_report", "cli_use", "cli", "__main__",
)  # fmt: skip
SOURCES = sorted(PACKAGE.rglob("*.py"))
LIGHT = (
    "crmatch", "crmatch.cli", "crmatch.config", "crmatch.recipes", "crmatch.results", "crmatch.methods", "crmatch.display",
    "crmatch.data.settings", "crmatch.data.packed", "crmatch.networks.config", "crmatch.training.plan",
    "crmatch.suites", "crmatch.grid", "crmatch.costs", "crmatch.memory", "crmatch.engines", "crmatch.ray_engine",
    "crmatch.table_progress", "crmatch.report.tables", "crmatch.report.table_formats",
    "crmatch.augment.variants", "crmatch.data.catalog", "crmatch.data.fetch", "crmatch.data.folder", "crmatch.data.preflight",
    "crmatch.analysis.curves", "crmatch.report.charts", "crmatch.cli_figure", "crmatch.cli_report",
)  # fmt: skip


def stage(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_stages(path: Path) -> set[str]:
    stages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("crmatch"):
            parts = node.module.split(".")
            stages |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            stages |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("crmatch.")}
    return stages


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_from_right_to_left_only(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    assert stage(path) in ORDER, f"{path} has no place in the order; give it one"
    here = ORDER.index(stage(path))
    wrong = {name for name in imported_stages(path) if name in ORDER and ORDER.index(name) > here}
    assert not wrong, f"{path} imports {wrong}, which come later"
    assert all(name in ORDER for name in imported_stages(path))


def test_training_knows_neither_evaluation_nor_results() -> None:
    imported = set().union(*(imported_stages(path) for path in (PACKAGE / "training").glob("*.py")))
    assert not imported & {"evaluation", "results", "data"}


def test_there_is_one_backward_pass_in_the_package() -> None:
    calls = [str(path) for path in SOURCES for _ in re.findall(r"(?<!def )\bbackward\(", path.read_text())]
    assert calls == [str(PACKAGE / "training" / "loop.py")]


def test_nothing_reads_pickles() -> None:
    forbidden = re.compile(r"\bpickle\b(?!=False)|(?<!safetensors\.)torch\.load\(|joblib|allow_pickle=True|shelve|marshal")
    found = [
        f"{path.name}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if forbidden.search(line) and "without pickle" not in line
    ]
    assert not found


def test_the_library_prints_nothing_and_configures_no_logging() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"^\s*print\(", text, re.MULTILINE), path
        assert path.name == "cli.py" or "basicConfig" not in text, path


@pytest.mark.parametrize("module", LIGHT)
def test_descriptions_of_runs_import_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_lazy_and_all_exist() -> None:
    import crmatch

    for name in crmatch.__all__:
        assert getattr(crmatch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = crmatch.nonsense


def test_departures_from_the_paper_are_marked_and_listed_in_the_docs() -> None:
    """Every docstring that says "Paper: ... Here: ... because" has its line in docs/decisions.md."""
    marked = []
    for path in SOURCES:
        flat = " ".join(path.read_text().split())
        marked += [(path, match) for match in re.findall(r"Paper: [^.]+\. Here: .{20}", flat)]
    assert marked
    decisions = (ROOT / "docs" / "decisions.md").read_text()
    for path, _ in marked:
        assert str(path.relative_to(ROOT)) in decisions, f"{path} departs from the paper; say so in docs/decisions.md"


def test_no_file_grows_beyond_400_lines() -> None:
    assert not [str(path) for path in SOURCES if len(path.read_text().splitlines()) > 400]
