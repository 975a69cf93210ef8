"""The documents: the site builds without warnings, links lead somewhere, the notebook runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOME = re.compile(
    r"https://(?:github\.com/crmatch/crmatch/(?:blob|tree)|raw\.githubusercontent\.com/crmatch/crmatch)/main/([^)\s\"#]+)"
)


@pytest.mark.parametrize("name", ["README.md", "pyproject.toml"])
def test_links_of_the_package_page_are_absolute_and_lead_to_files_of_the_repository(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", text), "relative links are dead on a package index"
    paths = HOME.findall(text)
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.process
def test_the_site_builds_without_warnings_and_every_page_is_reachable_from_the_index(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {path.resolve() for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    found, todo = set(), [tmp_path / "index.html"]
    while todo:
        page = todo.pop().resolve()
        if page in found or page not in pages:
            continue
        found.add(page)
        links = re.findall(r'href="?([^" >]+)', page.read_text())
        targets = [page.parent / unquote(urldefrag(link).url) for link in links if "://" not in link]
        todo += [target / "index.html" if target.is_dir() else target for target in targets]
    assert found == pages
    for page in pages:
        loaded = re.findall(r'(?:src|<link[^>]*href)="?(https?://[^" >]+)', page.read_text())
        assert not loaded, f"{page} loads {loaded} from another server"
    assert "--recompute" in (tmp_path / "cli" / "index.html").read_text()


@pytest.mark.process
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "docs" / "tutorial.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "test error" in said
    assert (tmp_path / "report.html").exists()
