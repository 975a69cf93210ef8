"""The review page in a real browser, the loop train, review, train, and the scores of unlabeled images behind it."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from chromium import chromium

from conftest import TINY_OPTIONS, Command, tiny_spec
from crmatch.analysis.finished_run import FinishedRun
from crmatch.data.images import DataSet, ImageSet
from crmatch.data.splits import Split
from crmatch.predict.label_suggestions import ReviewedRun, Scores, read_run, suggest
from crmatch.predict.model import load
from crmatch.report.review import unlabeled_cards, write_review
from crmatch.runs.workspace import Workspace
from finished import train_tiny, write_photos


@pytest.fixture(scope="module")
def reviewed(digits_run: Path) -> ReviewedRun:
    return read_run(digits_run, Workspace())


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with chromium(tmp_path) as driver:
        yield driver


def cards(browser: Any) -> list[Any]:
    return list(browser.find_elements("css selector", ".card"))


def name(card: Any) -> str:
    return str(card.find_element("class name", "name").text)


def choose(browser: Any, menu: str, text: str) -> None:
    from selenium.webdriver.support.select import Select

    Select(browser.find_element("id", menu)).select_by_visible_text(text)


@pytest.mark.process
def test_labels_given_in_the_browser_train_the_next_model(
    crmatch: Command, browser: Any, digits_run: Path, tmp_path: Path
) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    page = tmp_path / "review.html"
    outcome = crmatch("review", digits_run, "--out", page)
    assert outcome.code == 0, outcome.err
    assert "1,257 pictures" in outcome.out
    browser.get(page.as_uri())
    for option in Select(browser.find_element("id", "believed")).options[1:]:  # a class that the short run predicts often
        predicted = option.text
        choose(browser, "believed", predicted)
        if len(cards(browser)) >= 10:
            break
    assert {card.find_element("css selector", ".belief b").text for card in cards(browser)} == {predicted}

    first, second, third = cards(browser)[:3]
    names = [name(card) for card in (first, second, third)]
    browser.find_element("tag name", "body").send_keys(Keys.ENTER)  # confirms the first card, which needs no click before
    Select(second.find_element("tag name", "select")).select_by_visible_text("7")  # corrects by mouse
    third.find_element("tag name", "img").click()  # enlarges, and labels nothing
    assert browser.find_element("id", "caption").text.startswith(f"{names[2]}: ")
    browser.switch_to.active_element.send_keys("4", Keys.ARROW_LEFT, "3", Keys.ESCAPE)  # corrects by keyboard, twice
    assert browser.find_element("id", "count").text == "3 labels"

    browser.refresh()
    assert browser.find_element("id", "count").text == "3 labels"
    choose(browser, "state", "labeled here")
    assert sorted(map(name, cards(browser))) == sorted(names)
    browser.find_element("id", "search").send_keys(names[2])
    time.sleep(0.5)
    assert names[2] in map(name, cards(browser))
    browser.find_element("id", "download").click()
    labels, end = tmp_path / "downloads" / "labels.csv", time.monotonic() + 10
    while not labels.exists() and time.monotonic() < end:
        time.sleep(0.05)
    rows = {row["path"]: row["label"] for row in csv.DictReader(labels.read_text().splitlines())}
    assert rows == dict(zip(names, [predicted, "7", "3"], strict=True))

    again = crmatch("train", "digits@4", "--labels", labels, "--out", tmp_path, *TINY_OPTIONS, "--json")
    assert again.code == 0, again.err
    record = json.loads(again.out)
    assert (record["labeled_images"], record["unlabeled_images"]) == (43, 1254)
    assert "labels=" in record["run"]


@pytest.mark.process
def test_every_order_is_the_one_it_says(browser: Any, reviewed: ReviewedRun, tmp_path: Path) -> None:
    page = tmp_path / "review.html"
    write_review(reviewed, page)
    browser.get(page.as_uri())
    scores = reviewed.scores
    orders = {
        "least certain": scores.uncertainty,
        "weak and strong views disagree": scores.disagreement,
        "most surprising": scores.surprise,
    }
    for text, values in orders.items():
        choose(browser, "sort", text)
        shown = float(values[scores.rows == int(name(cards(browser)[0]))])
        assert shown == pytest.approx(float(values.max()), abs=1e-3), text
    choose(browser, "sort", "by class")
    classes = [int(card.find_element("css selector", ".belief b").text) for card in cards(browser)]
    assert classes == sorted(classes)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.refresh()
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")
    assert not browser.get_log("browser")


def many(count: int, class_names: tuple[str, ...]) -> ReviewedRun:
    """A made-up run with `count` unlabeled images."""
    randomness = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 32, 32), generator=randomness).byte()
    probabilities = torch.rand(count, len(class_names), generator=randomness).softmax(1)
    scores = Scores(torch.arange(count), probabilities, *torch.rand(2, count), torch.rand(count, 4), torch.rand(2, 4))
    run = FinishedRun(
        Path(),
        cast(Any, SimpleNamespace(spec=tiny_spec(Path(), setting="digits@4"))),
        cast(Any, SimpleNamespace(class_names=class_names)),
        DataSet(ImageSet(images, torch.full((count,), -1), class_names), None),
        Split(torch.tensor([], dtype=torch.int64), torch.arange(count)),
    )
    return ReviewedRun(run, tuple(f"pictures/{row:05d}.jpg" for row in range(count)), scores)


@pytest.mark.process
def test_five_thousand_pictures_paint_in_two_seconds_and_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "review.html"
    hostile = "</script><script>document.title='broken'</script>"
    assert write_review(many(5000, ("cat", hostile, "dog")), page) == 5000
    browser.get(page.as_uri())
    paint = browser.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 2000
    assert browser.title.startswith("Review: ")
    assert "5,000 of 5,000" in browser.find_element("id", "shown").text
    before = len(cards(browser))
    browser.execute_script("window.scrollTo(0, document.body.scrollHeight)")
    time.sleep(0.5)
    assert before < len(cards(browser)) < 1000
    seconds = browser.execute_script(
        "const begin = performance.now(); const menu = document.getElementById('sort'); menu.value = 'surprise';"
        "menu.dispatchEvent(new Event('change')); return (performance.now() - begin) / 1000"
    )
    assert seconds < 0.5


def test_pictures_are_shown_in_the_suggested_order_and_only_some_if_a_number_is_given(tmp_path: Path) -> None:
    reviewed, page = many(150, ("cat", "</script>dog")), tmp_path / "review.html"
    assert write_review(reviewed, page, most=10) == 10
    data = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert [image["n"] for image in data["images"]] == [item.name for item in suggest(reviewed, 10)]
    assert data["classes"] == ["cat", "</script>dog"]
    suggested = [item.row for item in suggest(reviewed, 100)]
    others = [row for row in reviewed.scores.uncertainty.argsort(descending=True, stable=True).tolist() if row not in suggested]
    assert [card["i"] for card in unlabeled_cards(reviewed)] == suggested + others


def test_nobody_is_asked_again_about_a_picture_whose_class_was_not_clear() -> None:
    reviewed = many(50, ("cat", "dog"))
    (first,) = suggest(reviewed, 1)
    again = suggest(reviewed._replace(lines={first.name: "", "elsewhere.jpg": ""}), 50)
    assert {item.name for item in again} == {*reviewed.names} - {first.name}


def test_suggestions_are_deterministic_uncertain_and_diverse(crmatch: Command, digits_run: Path, reviewed: ReviewedRun) -> None:
    found = suggest(reviewed, 20)
    assert len({item.row for item in found}) == 20
    assert not {item.row for item in found} & set(reviewed.run.split.labeled.tolist())
    chosen = torch.isin(reviewed.scores.rows, torch.tensor([item.row for item in found]))
    assert reviewed.scores.uncertainty[chosen].mean() > reviewed.scores.uncertainty.mean()
    rows = json.loads(crmatch("suggest", digits_run, "-n", 5, "--json").out)["rows"]
    assert rows == [{"picture": item.name, "why": item.reason} for item in found[:5]]
    assert all(" % or " in row["why"] for row in rows)


def test_scores_are_those_of_the_model(digits_run: Path, reviewed: ReviewedRun) -> None:
    scores = reviewed.scores
    assert len(scores.rows) == 1257
    expected = load(digits_run).predict_probabilities(reviewed.run.data.train.images[scores.rows])
    assert torch.allclose(scores.probabilities, expected, atol=1e-6)
    for values in (scores.disagreement, scores.uncertainty, scores.surprise):
        assert 0 <= float(values.min()) <= float(values.max()) <= 2


def test_strong_views_are_made_by_the_policy_that_the_run_learned(
    tmp_path: Path, stripes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crmatch.augment.ctaugment import CTAugment

    run = train_tiny(tmp_path / "runs", stripes, "fixmatch", **{"augmentation.policy": "ctaugment"})
    seen, draw = [], CTAugment.draw

    def recorded(policy: CTAugment, *arguments: Any) -> Any:
        seen.append(policy.rates())
        return draw(policy, *arguments)

    monkeypatch.setattr(CTAugment, "draw", recorded)
    reviewed = read_run(run, Workspace(tmp_path, stripes))
    assert seen == [reviewed.run.record.policy] * 4
    assert seen[0] != CTAugment().rates()


@pytest.mark.parametrize(("line", "name"), [("5000,3", "'5000'"), ("cat.jpg,3", "'cat.jpg'"), ("12,cat", "'cat'")])
def test_labels_of_a_data_set_that_do_not_fit_are_refused(crmatch: Command, tmp_path: Path, line: str, name: str) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text(f"path,label\n{line}\n")
    outcome = crmatch("train", "digits@4", "--labels", labels, "--out", tmp_path, *TINY_OPTIONS)
    assert outcome.code == 3
    assert name in outcome.err


@pytest.mark.process
def test_a_folders_review_keeps_the_labels_it_was_trained_with(crmatch: Command, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", labeled=6, unlabeled=18)
    labels = tmp_path / "labels.csv"
    labels.write_text("path,label\nunlabeled/07.jpg,down\n")
    arguments = ["--out", tmp_path / "runs", "--data-dir", tmp_path / "cache", *TINY_OPTIONS, "--no-baseline", "--json"]
    runs = [json.loads(crmatch("train", folder, *more, *arguments).out) for more in ([], ["--labels", labels])]
    assert runs[1]["labeled_images"] == runs[0]["labeled_images"] + 1
    assert runs[0]["run"] != runs[1]["run"]
    page = tmp_path / "review.html"
    assert crmatch("review", runs[1]["run"], "--out", page, "--data-dir", tmp_path / "cache").code == 0
    data = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert data["kept"] == [["unlabeled/07.jpg", "down"]]
    labels = {image["n"]: (image.get("l"), image.get("b")) for image in data["images"]}
    assert len(labels) == 24  # the labeled ones are shown, too
    assert list(labels.values()).count((None, None)) == 17
    assert labels["unlabeled/07.jpg"] == ("down", None)
    assert labels["labeled/across/00.jpg"] == ("across", "across")
    assert Path(data["images"][0]["o"].removeprefix("file://")).is_file()
