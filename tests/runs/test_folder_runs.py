"""Own pictures through the commands: the same result as the built-in set, and plain words about what was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import Command, options
from crmatch.data.images import DataSet
from crmatch.data.load import load_data
from crmatch.data.splits import Split, make_split

# The keys in which a folder's generic defaults differ from those of digits, and a short run of a small network.
ALIKE = {
    "plan.steps": 12, "plan.evaluate_every": 6, "plan.log_every": 4, "plan.checkpoint_every": 6, "plan.ema_decay": 0.99,
    "network.filters": 8, "augmentation.mirror": False, "plan.labeled_batch_size": 8, "plan.unlabeled_batch_size": 16,
    "method.rotation_images": 4,
}  # fmt: skip
SETTINGS = options(ALIKE)


@pytest.fixture(scope="module")
def digits() -> tuple[DataSet, Split]:
    data = load_data("digits")
    return data, make_split(data, 4, 1, "balanced", "remaining")


def save(image: torch.Tensor, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[0].numpy()).save(path)


@pytest.fixture
def exported(digits: tuple[DataSet, Split], tmp_path: Path) -> Path:
    """Digits as PNG files: four labeled ones of each class, the rest unlabeled, and the test set."""
    (train, test, _), split = digits
    folder = tmp_path / "my digits"
    for row in split.labeled.tolist():
        save(train.images[row], folder / "labeled" / str(int(train.labels[row])) / f"{row:05d}.png")
    for row in split.unlabeled.tolist():
        save(train.images[row], folder / "unlabeled" / f"{row:05d}.png")
    assert test is not None
    for row, label in enumerate(test.labels.tolist()):
        save(test.images[row], folder / "test" / str(label) / f"{row:05d}.png")
    return folder


def trained(crmatch: Command, tmp_path: Path, *arguments: object) -> Path:
    places = ["--out", tmp_path / "runs", "--data-dir", tmp_path / "cache"]
    outcome = crmatch("train", *arguments, *places, *SETTINGS, "--no-baseline", "--json")
    assert outcome.code == 0, outcome.err
    return Path(json.loads(outcome.out)["run"])


@pytest.mark.process
def test_a_folder_of_the_same_pictures_gives_the_built_in_sets_model(crmatch: Command, exported: Path, tmp_path: Path) -> None:
    built_in = trained(crmatch, tmp_path, "digits@4")
    folder = trained(crmatch, tmp_path, exported)
    assert folder.parent.parent.name == "my digits"
    assert (folder / "model.safetensors").read_bytes() == (built_in / "model.safetensors").read_bytes()
    records = [json.loads((run / "record.json").read_text()) for run in (built_in, folder)]
    assert records[0]["ema"] == records[1]["ema"]
    assert records[0]["test_images"] == records[1]["test_images"] == 500
    assert sorted(records[0]["per_class_error"]) == sorted(records[1]["per_class_error"])
    evaluated = crmatch("evaluate", folder, "--data-dir", tmp_path / "cache", "--json")
    assert json.loads(evaluated.out)["error"] == records[1]["ema"]["last"]


@pytest.mark.process
def test_the_same_through_labels_csv(crmatch: Command, digits: tuple[DataSet, Split], exported: Path, tmp_path: Path) -> None:
    (train, _, _), split = digits
    folder = tmp_path / "flat"
    for row in range(len(train)):
        save(train.images[row], folder / "pictures" / f"{row:05d}.png")
    (exported / "test").rename(folder / "test")
    labeled = set(split.labeled.tolist())
    classes = [int(label) if row in labeled else "" for row, label in enumerate(train.labels)]
    lines = [f"pictures/{row:05d}.png,{label}" for row, label in enumerate(classes)]
    (folder / "labels.csv").write_text("\n".join(["path,label", *lines]))
    built_in, flat = trained(crmatch, tmp_path, "digits@4"), trained(crmatch, tmp_path, folder)
    assert (flat / "model.safetensors").read_bytes() == (built_in / "model.safetensors").read_bytes()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """48x64 JPEG photos of two classes, half of them turned by EXIF, without a test set."""
    random = np.random.default_rng(0)
    folder = tmp_path / "photos"
    for number in range(24):
        kind = number % 2
        pixels = random.integers(0, 90, (48, 64, 3), dtype=np.uint8)
        pixels[:, :, kind] += 120
        place = folder / ("labeled" if number < 6 else "unlabeled") / (("red", "green")[kind] if number < 6 else "")
        place.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112] = 6 if number % 4 < 2 else 1
        Image.fromarray(pixels).save(place / f"{number:02d}.jpg", exif=exif)
    return folder


@pytest.mark.process
def test_photos_are_cropped_and_it_is_said(crmatch: Command, photos: Path, tmp_path: Path) -> None:
    arguments = ["--out", tmp_path / "runs", "--data-dir", tmp_path / "cache", *SETTINGS]
    outcome = crmatch("train", photos, *arguments)
    assert outcome.code == 0, outcome.err
    assert "center" in outcome.err
    assert "there is no test set" in outcome.out
    assert "CR-Match on photos" in outcome.out
    assert "Supervised only on photos" in outcome.out


@pytest.mark.process
def test_check_reports_a_folder_in_words_and_as_json(crmatch: Command, photos: Path, tmp_path: Path) -> None:
    (photos / "unlabeled" / "broken.png").write_text("no picture")
    outcome = crmatch("data", "check", photos, "--data-dir", tmp_path / "cache")
    assert outcome.code == 0
    assert "broken.png" in outcome.out
    report = json.loads(crmatch("data", "check", photos, "--data-dir", tmp_path / "cache", "--json").out)
    assert report["unlabeled"] == 18


@pytest.mark.process
@pytest.mark.parametrize(
    ("break_it", "code", "message"),
    [
        (lambda folder: (folder / "labeled").rename(folder / "things"), 3, "labeled/"),
        (lambda folder: [file.unlink() for file in (folder / "labeled" / "red").iterdir()], 3, "red"),
    ],
)
def test_folders_that_cannot_be_trained_on_say_why(
    crmatch: Command, photos: Path, tmp_path: Path, break_it: Callable[[Path], object], code: int, message: str
) -> None:
    break_it(photos)
    outcome = crmatch("train", photos, "--out", tmp_path / "runs", "--data-dir", tmp_path / "cache", *SETTINGS, "--json")
    assert outcome.code == code
    assert message in outcome.err
    assert len(outcome.err.strip().splitlines()) <= 2
    assert not (tmp_path / "runs").exists()


@pytest.mark.process
def test_class_folders_alone_are_enough_and_a_test_set_is_held_out_once(crmatch: Command, tmp_path: Path) -> None:
    random, folder = np.random.default_rng(0), tmp_path / "pets"
    for number in range(50):
        place = folder / ("cat", "dog")[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(place)
    places = ["--data-dir", tmp_path / "cache"]
    checked = crmatch("data", "check", folder, *places)
    assert "crmatch train holds out 10 pictures with labels (held-out.csv)" in checked.out
    assert not (folder / "held-out.csv").exists()
    command = ["train", folder, "--no-baseline", "--out", tmp_path / "runs", *places, *SETTINGS]
    first = crmatch(*command)
    assert first.code == 0, first.err
    assert "10 labeled pictures, a fifth of each class, are held out to measure the error" in first.err
    record = json.loads(next((tmp_path / "runs").rglob("record.json")).read_text())
    assert (record["labeled_images"], record["unlabeled_images"], record["test_images"]) == (40, 40, 10)
    again = crmatch(*command, "--name", "again")
    # The size is that of the check, and the report is not repeated: two lines, and one about size and cost.
    used = "Pictures of about 40 px are used at 32 px. Training takes about"
    assert used in checked.out
    assert again.err.splitlines()[1].endswith(f"the whole report: crmatch data check {folder}")
    assert again.err.splitlines()[2].startswith(used)
    assert "at 64 px it would take" in again.err
    assert "CR-Match on pets" in again.err.splitlines()[3]


def test_a_folder_or_labels_that_are_not_there_are_refused(crmatch: Command, tmp_path: Path) -> None:
    assert crmatch("train", tmp_path / "nowhere").code == 2
    outcome = crmatch("train", "digits@4", "--labels", tmp_path / "labels.csv")
    assert outcome.code == 2
    assert "header path,label" in outcome.err


@pytest.mark.process
def test_a_labels_file_adds_labels_for_the_next_run(crmatch: Command, photos: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("path,label\nunlabeled/07.jpg,green\nunlabeled/08.jpg,red\n")
    run = trained(crmatch, tmp_path, photos, "--labels", labels)
    record = json.loads((run / "record.json").read_text())
    assert (record["labeled_images"], record["unlabeled_images"]) == (8, 16)
    labels.write_text("path,label\nunlabeled/07.jpg,green\n")
    assert trained(crmatch, tmp_path, photos, "--labels", labels) != run, "other labels are another run"


def test_data_split_writes_five_files_once(crmatch: Command, tmp_path: Path) -> None:
    rows = json.loads(crmatch("data", "split", "digits@4", "--out", tmp_path, "--json").out)["rows"]
    assert [row["split"] for row in rows] == [1, 2, 3, 4, 5]
    before = {Path(row["file"]): Path(row["file"]).read_bytes() for row in rows}
    assert crmatch("data", "split", "digits@4", "--out", tmp_path).code == 0
    refused = crmatch("data", "split", "digits@4", "--rule", "proportional", "--out", tmp_path)
    assert refused.code == 3
    assert "never overwritten" in refused.err
    assert {path: path.read_bytes() for path in before} == before
