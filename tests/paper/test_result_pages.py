"""The pages of docs/results that are made from committed records say what these records say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def benchmark(name: str) -> ModuleType:
    location = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert location is not None
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    return module


def test_the_page_about_claims_is_what_its_records_make() -> None:
    results = benchmark("results")
    found = results.claims(None)
    page = ROOT / "docs" / "results" / "claims.md"
    assert page.read_text() == results.claims_page(found), "run make results"
    pictures = [page.with_name(name).is_file() for name in ("claims.png", "claims-main.png")]
    assert pictures == [any(one.sources for one in found)] * 2


def test_every_table_between_markers_is_what_its_records_make(capsys: pytest.CaptureFixture[str]) -> None:
    results = benchmark("results")
    blocks = results.BLOCK, results.TIMED_BLOCK
    pages = [page for page in (ROOT / "docs").rglob("*.md") if any(block.search(page.read_text()) for block in blocks)]
    assert {"methods.md", "quick-recipe.md"} <= {page.name for page in pages}
    for page in pages:
        assert results.rebuilt(page, None) == page.read_text(), "run make results"
    assert "is left as it is" not in capsys.readouterr().err
