"""docs/python-api.md: its code runs exactly as printed, and it names what the package exports."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import crmatch

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "python-api.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_names_and_shows_exactly_the_public_names() -> None:
    shown = set(re.findall(r"crmatch\.(\w+)", "\n".join(CODE))) - {"methods"}
    assert shown == set(crmatch.__all__)


@pytest.mark.process  # paths of pictures are decoded by another process
def test_the_code_of_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("page.py").write_text("\n".join(CODE), encoding="utf-8")
    import page  # type: ignore[import-not-found]

    try:
        assert len(crmatch.records("runs")) == 2
        assert page.own.spec.method.code.startswith("page.py:Smoothed#")
    finally:
        del sys.modules["page"]
