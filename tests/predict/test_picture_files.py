"""`crmatch predict`: files and folders in, classes out, unreadable files listed."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import Command
from crmatch.data.load import load_data
from crmatch.predict.model import load
from crmatch.predict.picture_files import predict_files

pytestmark = pytest.mark.process  # pictures are decoded by worker processes


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """40 digits in nested folders, and one file that is no picture."""
    folder = tmp_path / "new pictures"
    for row, image in enumerate(load_data("digits").train.images[:40]):
        path = folder / ("a" if row % 2 else "b/c") / f"{row:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    (folder / "a" / "broken.png").write_text("no picture")
    return folder


def test_files_get_the_probabilities_of_their_pixels(digits_run: Path, pictures: Path) -> None:
    model = load(digits_run)
    paths = sorted(pictures.rglob("0*.png"), key=lambda path: path.name)
    found = predict_files(model, paths, batch_size=7)
    expected = torch.cat([model.predict_probabilities(part) for part in load_data("digits").train.images[:40].split(7)])
    assert np.array_equal(found.probabilities, expected.numpy())
    assert not found.unreadable


def test_predict_writes_csv_and_lists_unreadable_files(
    crmatch: Command, digits_run: Path, pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "predictions.csv"
    outcome = crmatch("predict", digits_run, pictures, pictures / "a" / "001.png", "--out", out)
    assert outcome.code == 0, outcome.err
    assert "broken.png: not a readable" in outcome.err
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 42
    assert list(rows[0]) == ["path", "class", "confidence", "problem"]
    broken = [row for row in rows if row["problem"]]
    assert [(Path(row["path"]).name, row["class"], row["confidence"]) for row in broken] == [("broken.png", "", "")]


def test_probabilities_abstention_and_json(crmatch: Command, digits_run: Path, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "predictions.json"
    assert crmatch("predict", digits_run, pictures / "b", "--out", out, "--abstain", 0.999, "--probabilities").code == 0
    answer = json.loads(out.read_text())
    assert answer["classes"] == [str(digit) for digit in range(10)]
    for row in answer["predictions"]:
        assert row["class"] == ("" if row["confidence"] < 0.999 else row["class"])
        assert sum(row[f"p({digit})"] for digit in range(10)) == pytest.approx(1, abs=1e-4)
    shown = crmatch("predict", digits_run, pictures / "b")
    assert shown.out.startswith("path,class,confidence,problem\n")


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("nowhere", [], "there is no file or folder"),
        ("empty", [], "there is no picture in"),
        ("a/001.png", ["--out", "x.txt"], ".csv or .json"),
        ("a/001.png", ["--abstain", "2"], "--abstain"),
    ],
)
def test_wrong_requests_are_refused(
    crmatch: Command, digits_run: Path, pictures: Path, place: str, options: list[str], message: str
) -> None:
    (pictures / "empty").mkdir()
    outcome = crmatch("predict", digits_run, pictures / place, *options)
    assert outcome.code == 2
    assert message in outcome.err
