"""The labeling loop in a real browser, on handwritten digits: train, label suggested pictures, train again from that round."""

from __future__ import annotations

import contextlib
import csv
import http.client
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import chromium
from PIL import Image

from conftest import Command, Trained, options
from crmatch.predict.label_suggestions import read_run
from crmatch.predict.model import load
from crmatch.report.labeling import LabelingSite, read_folder
from crmatch.report.model_site import ModelSite
from crmatch.runs.workspace import Workspace
from finished import HOSTILE_NAMES, write_photos
from local_server import ask, cards_of, served

pytestmark = pytest.mark.process
SMALL = {
    "augmentation.mirror": False,
    "network.filters": 8,
    "plan.steps": 60,
    "plan.unlabeled_batch_size": 32,
    "method.rotation_images": 8,
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def write_digits(folder: Path, labeled: int = 2, test: int = 300, unlabeled: int = 300) -> dict[str, str]:
    """Two labeled digits of each class, others for testing, others unlabeled; returns the true classes of the last ones."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    seen, truth = dict.fromkeys(range(10), 0), dict[str, str]()
    left = test
    for number in np.random.default_rng(0).permutation(len(pixels)).tolist():
        label = int(classes[number])
        seen[label] += 1
        if seen[label] <= labeled:
            path = f"labeled/{label}/{number:04}.png"
        elif left:
            path, left = f"test/{label}/{number:04}.png", left - 1
        elif len(truth) < unlabeled:
            path = f"unlabeled/{number:04}.png"
            truth[path] = str(label)
        else:
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        digit = Image.fromarray((pixels[number].reshape(8, 8) * 255 / 16).astype(np.uint8))
        digit.resize((16, 16), Image.Resampling.BICUBIC).save(folder / path)
    return truth


def labels_in(folder: Path) -> dict[str, str]:
    file = folder / "labels.csv"
    return {row["path"]: row["label"] for row in csv.DictReader(file.read_text().splitlines())} if file.exists() else {}


def start_label(*arguments: object) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "crmatch", "label", *map(str, arguments), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    address = process.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", address)
    return process, address


def kill_while_labeling(process: subprocess.Popen[str], address: str, pictures: list[str]) -> list[str]:
    """Say "not sure" about one picture after the other and kill the server meanwhile; returns the pictures it confirmed."""
    row = {card["n"]: card["i"] for card in cards_of(ask(address, "")[1])}
    threading.Timer(0.5, process.kill).start()
    confirmed = []
    with contextlib.suppress(OSError, http.client.HTTPException):
        for picture in itertools.cycle(pictures):  # a fast server has answered for all of them before it is killed
            if ask(address, "labels", {"label": "", "pictures": [row[picture]]})[0] == 200:
                confirmed.append(picture)
    assert confirmed
    process.communicate()
    return confirmed


def wait(browser: Any, condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, browser.get_log("browser")
        time.sleep(0.02)


def show(browser: Any, address: str, width: int) -> None:
    size = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(address)
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.execute_script(overflow) <= 0


def focused(browser: Any) -> str:
    """The name of the picture whose card has the focus."""
    return str(browser.execute_script("return document.activeElement.image.n"))


def text_of(browser: Any, name: str) -> str:
    return str(browser.find_element("id", name).text)


def test_the_whole_loop_at_desktop_and_phone_width(
    crmatch: Command, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path / "cache"))
    folder = tmp_path / "digits"
    truth = write_digits(folder)
    arguments = ["--name", "round1", "--backbone", "none", "--image-size", 8, "--no-baseline", *options(SMALL)]
    assert crmatch("train", "digits", *arguments).code == 0
    suggested = [row["picture"] for row in json.loads(crmatch("suggest", "runs/digits/round1", "--json").out)["rows"]]

    # Desktop: twenty labels by key, and the server is killed in the middle.
    process, address = start_label("runs/digits/round1")
    show(browser, address, 1280)
    confirmed = {}
    for picture in suggested[:10]:
        assert focused(browser) == picture
        browser.switch_to.active_element.send_keys(truth[picture])
        wait(browser, lambda picture=picture: labels_in(folder).get(picture) == truth[picture])
        confirmed[picture] = truth[picture]
    answered = kill_while_labeling(process, address, [picture for picture in truth if picture not in suggested])
    browser.switch_to.active_element.send_keys(truth[suggested[10]])
    wait(browser, lambda: "not saved: crmatch label is not running any more" in text_of(browser, "message"))
    kept = labels_in(folder)
    assert {picture: kept.get(picture) for picture in [*confirmed, *answered]} == confirmed | dict.fromkeys(answered, "")
    (folder / "labels.csv").write_text("path,label\n" + "".join(f"{picture},{label}\n" for picture, label in confirmed.items()))
    process, address = start_label("runs/digits/round1")
    show(browser, address, 1280)
    for _ in range(10):
        picture = focused(browser)
        assert picture not in confirmed
        browser.switch_to.active_element.send_keys(truth[picture])
        confirmed[picture] = truth[picture]
    browser.find_element("id", "done").click()  # waits until everything is written
    wait(browser, lambda: "--from runs/digits/round1/split1-seed0 --name round2" in text_of(browser, "message"))
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert labels_in(folder) == confirmed
    assert "10 labeled" in said
    again = crmatch(*said.splitlines()[-1].removeprefix("Next: crmatch ").split(), "--no-baseline", "--json")
    assert again.code == 0, again.err
    second = json.loads(again.out)
    assert second["labeled_images"] == second["before"]["labeled_images"] + 20
    assert second["error"] < second["before"]["error"] - 5

    browser.get_log("browser")  # has complaints about the server that was killed
    # Phone: ten labels by tapping in the large view.
    reviewed = read_run(Path(second["run"]), Workspace.at())
    pictures = read_folder(folder, folder / "labels.csv", tmp_path / "cache", 8)
    with served(LabelingSite(folder, folder / "labels.csv", pictures, reviewed, "next")) as server:
        show(browser, server.address, 390)
        assert browser.find_element("tag name", "header").size["height"] < 200
        assert not browser.find_element("id", "keys").is_displayed()
        browser.find_element("css selector", ".card img").click()
        for number in range(1, 11):
            picture = text_of(browser, "caption").partition(":")[0]
            assert picture not in confirmed
            confirmed[picture] = truth[picture]
            buttons = browser.find_elements("css selector", "#choices button")
            next(button for button in buttons if button.text == truth[picture]).click()
            wait(browser, lambda number=number: len(labels_in(folder)) == 20 + number)
        assert not browser.get_log("browser")
        browser.get("about:blank")
    assert labels_in(folder) == confirmed
    third = crmatch("train", "digits", "--from", second["run"], "--name", "round3", "--no-baseline")
    found = re.search(r"Before ([\d.]+) %, now ([\d.]+) %, 10 more labels\.", third.out)
    assert found
    assert float(found[2]) < float(found[1])


def test_every_key_and_button_does_what_it_says(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    folder = write_photos(tmp_path / "photos", labeled=4, unlabeled=8)
    file = folder / "labels.csv"
    with served(LabelingSite(folder, file, read_folder(folder, file, tmp_path / "cache", None), None, "next")) as server:
        show(browser, server.address, 1280)
        order = [card.get_attribute("title") for card in browser.find_elements("css selector", ".name")]

        def press(*keys: str) -> None:
            browser.switch_to.active_element.send_keys(*keys)

        def holds(**labels: str) -> None:
            expected = {order[int(place[1:])]: label for place, label in labels.items()}
            wait(browser, lambda: labels_in(folder) == expected)

        press("a", "d")  # first letters of the classes
        holds(_0="across", _1="down")
        press("?")
        press("-")
        holds(_0="across", _1="down", _2="", _3="-")
        press("+")
        browser.switch_to.alert.send_keys(HOSTILE_NAMES[0])
        browser.switch_to.alert.accept()
        holds(_0="across", _1="down", _2="", _3="-", _4=HOSTILE_NAMES[0])
        press(Keys.ARROW_LEFT, Keys.BACKSPACE)
        holds(_0="across", _1="down", _2="", _3="-")
        browser.find_element("id", "undo").click()
        holds(_0="across", _1="down", _2="", _3="-", _4=HOSTILE_NAMES[0])
        assert browser.find_element("id", "count").text == "3 labels"
        # The large view shows the original; keys work there, too, and the focus follows.
        browser.execute_script("arguments[0].focus()", browser.find_elements("class name", "card")[5])
        press(" ")
        wait(browser, lambda: browser.execute_script("return document.getElementById('original').naturalWidth") == 30)
        press("d", Keys.ARROW_RIGHT, Keys.ARROW_LEFT, "a", " ")
        holds(_0="across", _1="down", _2="", _3="-", _4=HOSTILE_NAMES[0], _5="down", _6="across")
        assert focused(browser) == order[7]
        # Labeled pictures are shown; one whose directory names its class cannot be unsure.
        Select(browser.find_element("id", "state")).select_by_visible_text("labeled")
        names = {card.get_attribute("title") for card in browser.find_elements("css selector", ".name")}
        assert len(names) == 9
        browser.find_element("id", "search").send_keys("labeled/across")
        time.sleep(0.3)
        card = browser.find_element("class name", "card")
        assert [
            option.text for option in Select(card.find_element("tag name", "select")).options if not option.is_enabled()
        ] == ["not sure"]
        browser.refresh()
        assert browser.find_element("id", "count").text == "0 labels"  # of this visit
        holds(_0="across", _1="down", _2="", _3="-", _4=HOSTILE_NAMES[0], _5="down", _6="across")
    assert not browser.get_log("browser")


def test_many_are_confirmed_at_once_and_undone_at_once(
    crmatch: Command, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selenium.webdriver.support.select import Select

    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path / "cache"))
    folder = write_photos(tmp_path / "photos", labeled=4, unlabeled=30)
    said = crmatch("train", folder, "--out", tmp_path / "runs", "--no-baseline", *options(SMALL | {"plan.steps": 5}), "--json")
    reviewed = read_run(Path(json.loads(said.out)["run"]), Workspace.at())
    site = LabelingSite(
        folder, folder / "labels.csv", read_folder(folder, folder / "x", tmp_path / "cache", None), reviewed, ""
    )
    best, classes = reviewed.scores.probabilities.max(dim=1)
    chosen = classes.mode().values.item()
    least = round(100 * float(best[classes == chosen].median()))
    expected = {
        reviewed.names[row]
        for row, value, label in zip(reviewed.scores.rows.tolist(), best.tolist(), classes.tolist(), strict=True)
        if label == chosen and round(value, 3) >= least / 100
    }
    assert 0 < len(expected) < 30
    with served(site) as server:
        show(browser, server.address, 1280)
        Select(browser.find_element("id", "believed")).select_by_index(1 + chosen)
        number = browser.find_element("id", "least")
        number.clear()
        number.send_keys(str(least))
        browser.execute_script("document.activeElement.blur()")
        assert text_of(browser, "many") == f"confirm these {len(expected)}"
        browser.find_element("id", "many").click()
        browser.switch_to.alert.accept()
        wait(browser, lambda: labels_in(folder) == dict.fromkeys(expected, ("across", "down")[chosen]))
        browser.find_element("id", "undo").click()
        wait(browser, lambda: labels_in(folder) == {})


def test_serve_shows_the_classes_of_a_picture(browser: Any, trained: Trained, tmp_path: Path) -> None:
    file = write_photos(tmp_path, some=1) / "some" / "00.jpg"
    (tmp_path / "no picture.jpg").write_text("<b>")
    model = load(trained.run)
    with served(ModelSite(model, "stripes")) as server:
        show(browser, server.address, 390)
        upload = browser.find_element("id", "file")
        upload.send_keys(str(file))
        wait(browser, lambda: len(browser.find_elements("css selector", "#result b")) == len(model.class_names))
        assert browser.find_element("css selector", "#result b").text == model.predict(file)[0].class_name
        upload.send_keys(str(tmp_path / "no picture.jpg"))
        wait(browser, lambda: "no picture.jpg: not a readable" in text_of(browser, "message"))
