"""The package as users get it: wheel and source archive, their contents and metadata, and both at work without the checkout."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = ["--steps", "20", "--json"]


def call(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return what it says; the test fails with its errors."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a source archive, and with the wheel that is built from it."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


@pytest.mark.process
def test_the_archives_hold_what_they_should_and_the_index_accepts_them(built: Path) -> None:
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    if (ROOT / ".git").exists():
        tracked = {name for name in call("git", "ls-files").splitlines() if not name.startswith(".")}
        assert not tracked - held, "files of the repository that the source archive leaves out"
    files = zipfile.ZipFile(wheel).namelist()
    assert {"crmatch/py.typed", "crmatch/report/templates/report.html"} <= set(files)
    assert not [name for name in files if not name.startswith(("crmatch/", "crmatch-"))]
    (name,) = (name for name in files if name.endswith("METADATA"))
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(name))
    assert metadata["Author"] == "crmatch developers"
    assert metadata["Keywords"]
    assert len(metadata.get_all("Project-URL") or []) >= 4
    assert len(metadata.get_all("Classifier") or []) >= 10
    call(sys.executable, "-m", "twine", "check", "--strict", source, wheel)


def test_the_version_is_the_same_everywhere() -> None:
    from crmatch import __version__

    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_dockerfile_copies_what_exists_and_starts_the_command() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"pyproject.toml", "src"} <= set(copied)
    assert not [name for name in copied if not (ROOT / name).exists()]
    assert 'ENTRYPOINT ["crmatch"]' in lines
    assert '\ncrmatch = "crmatch.__main__:main"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
@pytest.mark.process
def test_wheel_and_source_archive_work_in_a_new_environment(built: Path, tmp_path: Path) -> None:
    """The wheel trains, predicts and reports; the tests of the source archive pass with it."""
    call(sys.executable, "-m", "venv", tmp_path / "venv")
    programs = tmp_path / "venv" / "bin"
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    tools = ["pytest", "pytest-xdist", "hypothesis"]
    call(programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, *tools)
    place = {"cwd": tmp_path, "CRMATCH_DATA": str(tmp_path / "data"), "PYTHONPATH": ""}
    where = call(programs / "python", "-c", "import crmatch; print(crmatch.__file__)", **place)
    assert where.startswith(str(tmp_path))
    call(programs / "crmatch", "train", "digits@4", *STEPS, **place)
    (record,) = tmp_path.glob("runs/**/record.json")
    call(programs / "crmatch", "show", "data", "digits", "--out", "digits.png", **place)
    answer = call(programs / "crmatch", "predict", record.parent, "digits.png", **place)
    assert "digits.png" in answer
    call(programs / "crmatch", "report", **place)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (folder,) = (tmp_path / "source").iterdir()
    options = ["-n", "2", "--dist", "loadfile", "-m", "not slow and not process", "-q"]
    said = call(programs / "python", "-m", "pytest", *options, **{**place, "cwd": folder, "CRMATCH_QUICK": "1"})
    assert " passed" in said
