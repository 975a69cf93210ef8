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
LAYERS = (
    {"errors", "randomness", "atomic_files", "strict_model", "own_code"},
    {"data"},
    {"augment", "networks", "distributed"},
    {"losses", "methods", "training"},
    {"spec", "evaluation"},
    {"runs"},
    {"predict", "analysis"},
    {"paper", "engines", "report"},
    {"estimator", "cli", "__main__"},
)
"""A room imports from its own layer and from earlier ones."""
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
SOURCES = sorted(PACKAGE.rglob("*.py"))
LIGHT = (
    "crmatch", "crmatch.cli.app", "crmatch.cli.display", "crmatch.spec.run_spec", "crmatch.spec.recipes", "crmatch.methods",
    "crmatch.networks.config", "crmatch.training.plan", "crmatch.augment.variants", "crmatch.data.settings",
    "crmatch.data.packed", "crmatch.data.official.fetch", "crmatch.data.folder.preflight", "crmatch.runs.record",
    "crmatch.runs.directory", "crmatch.runs.cost", "crmatch.paper.formats", "crmatch.engines.ray", "crmatch.engines.progress",
    "crmatch.paper.verdicts",
    "crmatch.analysis.curves", "crmatch.report.charts", "crmatch.runs.finished", "crmatch.own_code",
)  # fmt: skip
"""Modules that must not import torch: the ones behind help, specs, tables and dry runs."""


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("crmatch"):
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("crmatch.")}
    return rooms


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_from_its_own_layer_and_earlier_ones(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    assert room(path) in LAYER_OF, f"{path} belongs to no layer; give its room one"
    wrong = {name for name in imported_rooms(path) if LAYER_OF[name] > LAYER_OF[room(path)]}
    assert not wrong, f"{path} imports {wrong}, which come later"


def test_the_package_root_stays_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 10


def test_training_knows_neither_evaluation_nor_results() -> None:
    imported = set().union(*(imported_rooms(path) for path in (PACKAGE / "training").glob("*.py")))
    assert not imported & {"evaluation", "runs", "data"}


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
    # One module reads PyTorch files: of known sha256, and weights only.
    (line,) = found
    assert line.startswith("weights.py: pickled = torch.load(")
    assert line.endswith("weights_only=True)")


def test_the_library_prints_nothing_and_configures_no_logging() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert not re.search(r"^\s*print\(", text, re.MULTILINE), path
        assert path.name == "app.py" or "basicConfig" not in text, path


@pytest.mark.process
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
