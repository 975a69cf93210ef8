"""Rounds of labeling: `train --from`, labels that change, pictures that are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import TINY_OPTIONS, Command
from crmatch.analysis.finished_run import open_run
from crmatch.data.folder.preflight import check_folder
from crmatch.data.folder.scan import scan_folder
from crmatch.data.splits import given_split
from crmatch.errors import DataError, RequestError, StoppedError
from crmatch.runs.directory import RunDirectory
from crmatch.runs.finished import read_record
from crmatch.runs.run import run, starting_weights
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import replace
from finished import result_of, write_photos

pytestmark = pytest.mark.process
LINES = "path,label\nunlabeled/07.jpg,down\nunlabeled/08.jpg,across\n"


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path / "cache"))
    return write_photos(tmp_path / "photos", labeled=4, unlabeled=12, test=6)


def train(crmatch: Command, *arguments: object) -> dict[str, Any]:
    outcome = crmatch("train", "photos", "--no-baseline", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out))


def test_the_next_round_starts_from_the_weights_of_the_one_before_and_resumes_exactly(crmatch: Command, photos: Path) -> None:
    first = train(crmatch, "--name", "round1", *TINY_OPTIONS, "--set", "seed=3")
    (photos / "labels.csv").write_text(LINES)
    said = crmatch("train", "photos", "--no-baseline", "--from", "runs/photos/round1")
    found = re.search(r"Before ([\d.]+) %, now ([\d.]+) %, 2 more labels\.\nSaved in (.+)", said.out)
    assert found, said
    second = read_record(Path(found[3]))
    assert (float(found[1]), float(found[2])) == (round(first["error"], 1), round(second.error or 0, 1))
    assert re.search(r"labels=\w{8},from=\w{8}", found[3])
    # Everything but the labels is as it was.
    before = read_record(Path(first["run"]))
    assert second.spec.start_from == f"{Path(first['run']).resolve()}#{starting_checksum(before, first['run'])}"
    same = {"start_from": None, "data.labels_checksum": None}
    assert replace(second.spec, **same) == before.spec
    # The same command returns the same run, and a stopped one is resumed to the same bits.
    again = crmatch("train", "photos", "--no-baseline", "--from", "runs/photos/round1", "--json")
    assert json.loads(again.out)["run"] == found[3]
    other, calls = Workspace.at("other"), iter(range(100))
    with pytest.raises(StoppedError):
        run(second.spec, other, stop=lambda: next(calls) > 8)
    run(second.spec, other)
    assert result_of(other.run_directory(second.spec)) == result_of(RunDirectory(Path(found[3])))
    # It is another training than one from the beginning.
    scratch = train(crmatch, *TINY_OPTIONS, "--seed", 3)
    assert scratch["final"]["loss/total"] != second.final["loss/total"]


def starting_checksum(record: Any, path: str) -> str:
    return str(json.loads((Path(path) / "config.json").read_text())["checksum"])[:8]


def test_a_new_class_keeps_the_backbone_and_another_network_is_refused(crmatch: Command, photos: Path) -> None:
    first = train(crmatch, "--name", "round1", *TINY_OPTIONS)
    model = Path(first["run"]) / "config.json"
    spec = replace(
        read_record(Path(first["run"])).spec, start_from=f"{first['run']}#{json.loads(model.read_text())['checksum'][:8]}"
    )
    names = ("across", "down")
    whole, part = starting_weights(spec, names), starting_weights(spec, (*names, "new"))
    assert whole
    assert part
    assert {name.partition(".")[0] for name in whole} == {"backbone", "classifier"}
    assert {name.partition(".")[0] for name in part} == {"backbone"}
    with pytest.raises(RequestError, match="another network"):
        starting_weights(replace(spec, **{"network.filters": 8}), names)
    with pytest.raises(DataError, match="not the one to start from"):
        starting_weights(replace(spec, start_from=f"{first['run']}#00000000"), names)
    (photos / "labels.csv").write_text("path,label\nunlabeled/07.jpg,new\n")
    assert train(crmatch, "--from", "latest")["class_names"] == ["across", "down", "new"]
    refused = {
        "another folder": ("train", write_photos(photos.parent / "others", labeled=4, unlabeled=4), "--from", "latest"),
        "another method": ("train", "photos", "--from", "latest", "--method", "fixmatch"),
        "another recipe": ("train", "photos", "--from", "latest", "--recipe", "paper"),
        "no run": ("train", "photos", "--from", "nowhere"),
    }
    for what, command in refused.items():
        outcome = crmatch(*command)
        assert (outcome.code in (2, 3), len(outcome.err.strip().splitlines())) == (True, 2), what


def test_new_labels_in_the_folder_are_a_new_run_and_the_old_one_keeps_its_own(crmatch: Command, photos: Path) -> None:
    (photos / "labels.csv").write_text(LINES)
    first = train(crmatch, *TINY_OPTIONS)
    assert first["labeled_images"] == 6
    (photos / "labels.csv").write_text(LINES + "unlabeled/09.jpg,a new class\nunlabeled/10.jpg,-\nlabeled/down/01.jpg,across\n")
    second = train(crmatch, *TINY_OPTIONS)
    assert first["run"] != second["run"]
    assert (second["labeled_images"], second["unlabeled_images"]) == (7, 8)
    # Analyses of the old run still see what it was trained with.
    for one in (first, second):
        opened = open_run(one["run"], Workspace.at())
        assert opened.data.train.fingerprint == one["data_fingerprint"]
        assert (len(opened.split.labeled), len(opened.split.unlabeled)) == (one["labeled_images"], one["unlabeled_images"])
        assert json.loads(crmatch("evaluate", one["run"], "--json").out)["error"] == one["error"]
    assert crmatch("suggest", first["run"], "-n", 2).code == 0  # scores the pictures that are unlabeled now
    (photos / "unlabeled" / "11.jpg").unlink()
    assert "changed since it was trained" in crmatch("evaluate", first["run"]).err
    assert crmatch("suggest", first["run"], "-n", 2).code == 0


def test_labels_that_change_while_a_run_starts_are_noticed(crmatch: Command, photos: Path) -> None:
    (photos / "labels.csv").write_text(LINES)
    spec = read_record(Path(train(crmatch, *TINY_OPTIONS)["run"])).spec
    (photos / "labels.csv").write_text(LINES + "unlabeled/09.jpg,down\n")
    with pytest.raises(RequestError, match="no longer those of this run"):
        run(spec, Workspace.at("other"))


def test_without_test_pictures_only_the_labels_are_compared(crmatch: Command, photos: Path) -> None:
    (photos / "test").rename(photos.parent / "elsewhere")
    train(crmatch, "--name", "round1", *TINY_OPTIONS)
    (photos / "labels.csv").write_text("path,label\nunlabeled/07.jpg,down\n")
    said = crmatch("train", "photos", "--no-baseline", "--from", "runs/photos/round1")
    assert "1 more label than before; without test pictures the errors cannot be compared." in said.out


def test_pictures_that_are_left_out_are_in_no_part_of_the_training_set(photos: Path) -> None:
    (photos / "labels.csv").write_text("path,label\nunlabeled/07.jpg,-\nlabeled/down/01.jpg,-\n")
    index = scan_folder(photos)
    left_out = [path for path, role in zip(index.paths, index.roles, strict=True) if role == "left out"]
    assert left_out == ["labeled/down/01.jpg", "unlabeled/07.jpg"]
    assert index.class_names == ("across", "down")
    report = check_folder(photos, 16)
    assert (sum(item.labeled for item in report.classes), report.unlabeled) == (3, 11)
    assert "warning: 2 pictures left out by labels.csv" in report.lines()
    split = given_split(torch.tensor([0, -2, -1, 1, -1, -2]), "all")
    assert (split.labeled.tolist(), split.unlabeled.tolist()) == ([0, 3], [0, 3, 2, 4])
    (photos / "labels.csv").write_text("path,label\n" + "".join(f"labeled/down/0{row}.jpg,-\n" for row in (1, 3)))
    with pytest.raises(DataError, match="no pictures of down"):
        scan_folder(photos)


def test_labels_of_a_data_set_can_leave_images_out(crmatch: Command, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("path,label\n3,-\n4,\n5,0\n")
    outcome = crmatch("train", "digits@4", "--labels", tmp_path / "labels.csv", "--out", tmp_path, *TINY_OPTIONS, "--json")
    record = json.loads(outcome.out)
    assert record["labeled_images"] + record["unlabeled_images"] == 1297 - 1
