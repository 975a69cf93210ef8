"""The pages about pictures and classes whose names are code, in a real browser: everything is text, nothing runs."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import SMALLEST, Command, options
from crmatch.data.spreadsheet import csv_text, guarded, unguarded
from finished import write_photos

sys.path.append(str(Path(__file__).resolve().parents[1] / "report"))
from chromium import chromium

CLASSES = ('"><img src=x onerror="document.title=\'broken\'">', "=1+1 \u202e'right to left'\u2066 שלום `${document.title=2}`")
PICTURES = (
    "<svg onload=document.title='broken'>.jpg",
    "<script>document.title='broken'&lt;.jpg",
    "' onclick='document.title=1' \".jpg",
    "\u202egnp.exe\u2066 {{ 7 * 7 }}.jpg",
    "=HYPERLINK(1).jpg",
    '-1+1, "@SUM".jpg',
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures in a folder that is named as badly as they are."""
    folder = write_photos(tmp_path / "<b>photos' & \"co", labeled=4, unlabeled=len(PICTURES), test=6)
    for part in ("labeled", "test"):
        for before, name in zip(("across", "down"), CLASSES, strict=True):
            (folder / part / before).rename(folder / part / name)
    for picture, name in zip(sorted((folder / "unlabeled").iterdir()), PICTURES, strict=True):
        picture.rename(picture.with_name(name))
    return folder


def opened(browser: Any, page: Path) -> str:
    """The text of a page, which asked for nothing else, logged no error, and in which nothing ran."""
    browser.get_log("performance")
    browser.get(page.as_uri())
    title = browser.title
    for one in browser.find_elements("css selector", "img, [title], select")[:200]:
        browser.execute_script(
            "for (const kind of ['click', 'mouseover', 'focus']) arguments[0].dispatchEvent(new Event(kind))", one
        )
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    own = (f"{page.parent.as_uri()}/", "data:", "chrome:")  # a review shows the originals of its own folder
    assert not [address for address in asked if not address.startswith(own)]
    assert browser.title == title
    assert "broken" not in title
    assert browser.get_log("browser") == []
    assert browser.find_elements("css selector", "[onerror], [onload], [onclick], img[src=x]") == []
    return str(
        browser.execute_script("return document.body.textContent + [...document.querySelectorAll('[title]')].map(o => o.title)")
    )


@pytest.mark.process
def test_names_that_are_code_are_shown_as_text_and_come_back_from_a_csv_file(
    crmatch: Command, browser: Any, folder: Path, tmp_path: Path
) -> None:
    places = ["--data-dir", tmp_path / "data", "--out", tmp_path / "runs"]
    keys = options({**SMALLEST, "plan.steps": 4})
    train = ["train", folder, "--recipe", "quick", "--image-size", 16, "--no-baseline", *places, *keys]
    assert crmatch(*train).code == 0
    outcome = crmatch("report", tmp_path / "runs", "--data-dir", tmp_path / "data", "--out", tmp_path / "report.html")
    assert outcome.code == 0, outcome.err
    text = opened(browser, tmp_path / "report.html")
    assert all(name in text for name in (*CLASSES, folder.name))
    assert browser.execute_script("return getComputedStyle(document.querySelector('bdi')).unicodeBidi") == "isolate"
    outcome = crmatch("review", tmp_path / "runs", "--data-dir", tmp_path / "data", "--out", tmp_path / "review.html")
    assert outcome.code == 0, outcome.err
    text = opened(browser, tmp_path / "review.html")
    assert all(name in text for name in (*CLASSES, *PICTURES, folder.name))

    predicted = crmatch("predict", tmp_path / "runs", folder / "unlabeled", "--out", tmp_path / "predictions.csv")
    assert predicted.code == 0, predicted.err
    with open(tmp_path / "predictions.csv", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    labels = tmp_path / "labels.csv"
    rows = [{"path": f"unlabeled/{name}", "label": CLASSES[1]} for name in PICTURES[:-1]]
    labels.write_text(csv_text(rows))
    again = crmatch(*train, "--labels", labels, "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["labeled_images"] == 4 + len(rows)


@pytest.mark.parametrize(
    "text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\tx", "'=x", "''=x", "'quoted'", "-5", "plain", ""]
)
def test_a_guarded_cell_is_no_formula_and_comes_back(text: str) -> None:
    cell = guarded(text)
    assert unguarded(cell) == text
    assert not cell.startswith(("=", "+", "@", "\t"))
    assert not cell.startswith("-") or cell in ("-5", "-")  # a number, and the label of pictures that are left out
