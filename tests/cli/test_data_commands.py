"""`crmatch data` and `crmatch train` on fetched archives and on a corpus with broken pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from official_archives import MAKERS, QUICK, Server, entry
from picture_corpus import write_corpus

from conftest import Command
from crmatch.data.official import fetch as fetching
from finished import write_photos

SHORT = ["--recipe=quick", "--set=plan.steps=3", "--set=network.filters=8"]


def offer(server: Server, monkeypatch: pytest.MonkeyPatch, name: str, *manners: str, wrong: bool = False) -> None:
    """Let the commands fetch the small official set `name`, or wrong bytes in its place, from the loopback server."""
    files = MAKERS[name]().files
    served = {file: b"x" * len(content) if wrong else content for file, content in files.items()}
    monkeypatch.setitem(fetching.fetch.__kwdefaults__, "catalog", {name: entry(name, files, server.serve(served, *manners))})
    monkeypatch.setitem(fetching.fetch.__kwdefaults__, "patience", QUICK)


@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_fetch_continues_a_dropped_download_and_the_set_trains(
    crmatch: Command, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    offer(server, monkeypatch, name, "drop")
    outcome = crmatch("data", "fetch", name, "--data-dir", tmp_path, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == {"packed": str(tmp_path / f"{name}.npz")}
    assert name in crmatch("data", "list", "--data-dir", tmp_path).out
    sheet = crmatch("show", "data", name, "--data-dir", tmp_path, "--out", tmp_path / "sheet.png")
    assert sheet.code == 0, sheet.err
    rule = ["--set=data.split_rule=balanced", "--set=data.unlabeled=all"]
    trained = crmatch("train", f"{name}@1", "--data-dir", tmp_path, "--out", tmp_path / "runs", *SHORT, *rule)
    assert trained.code == 0, trained.err


def test_a_download_that_cannot_succeed_ends_in_two_lines_and_code_3(
    crmatch: Command, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offer(server, monkeypatch, "cifar10", wrong=True)
    outcome = crmatch("data", "fetch", "cifar10", "--data-dir", tmp_path)
    assert outcome.code == 3
    assert len([line for line in outcome.err.splitlines() if line.strip()]) <= 2, outcome.err
    assert not (tmp_path / "cifar10.npz").exists()


@pytest.mark.process
def test_a_folder_with_fifty_broken_pictures_trains_names_them_and_is_drawn(crmatch: Command, tmp_path: Path) -> None:
    broken, cache = write_corpus(tmp_path / "corpus"), ["--data-dir", tmp_path / "cache"]
    outcome = crmatch("train", tmp_path / "corpus", *cache, "--out", tmp_path / "runs", *SHORT)
    assert outcome.code == 0, outcome.err
    assert "50" in outcome.err
    assert all(path in outcome.err for path in broken)
    outcome = crmatch("show", "data", tmp_path / "corpus", *cache, "--out", tmp_path / "sheet.png")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "sheet.png").stat().st_size > 1000


@pytest.mark.process
def test_what_is_kept_of_pictures_is_shown_and_removed(crmatch: Command, tmp_path: Path) -> None:
    folder, data_dir = write_photos(tmp_path / "photos", labeled=4, unlabeled=4), tmp_path / "data"
    assert crmatch("data", "check", folder, "--data-dir", data_dir).code == 0
    assert "decoded pictures: 0 MB in" in crmatch("data", "clean", "--dry-run", "--data-dir", data_dir).out
    assert list(data_dir.rglob("pixels-*"))
    assert "stored features: 0 MB removed" in crmatch("data", "clean", "--data-dir", data_dir).out
    assert not list(data_dir.rglob("pixels-*"))
    assert crmatch("data", "check", folder, "--data-dir", data_dir).code == 0
