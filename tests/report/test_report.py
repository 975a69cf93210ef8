"""The report page: numbers as in the records, names escaped, small, complete without data or curves."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from urllib.request import url2pathname

import numpy as np
import pytest
import torch
from jinja2 import Environment, PackageLoader

from conftest import Command, Trained
from crmatch.data.settings import parse_setting
from crmatch.report.charts import Series, line_chart, round_marks
from crmatch.report.page import find_baseline, spec_rows
from crmatch.report.pictures import confident_mistakes, least_certain
from crmatch.runs.finished import read_record, short_names
from crmatch.runs.record import describe_interval
from crmatch.spec.recipes import recipe
from finished import HOSTILE_NAMES, stripes_in, train_tiny, write_photos

CSS = Path(__file__).resolve().parents[2] / "src/crmatch/report/templates/report.css"


def write(crmatch: Command, out: Path, *arguments: object) -> str:
    outcome = crmatch("report", *arguments, "--out", out)
    assert outcome.code == 0, outcome.err
    assert str(out) in outcome.out
    return out.read_text(encoding="utf-8")


def test_the_page_has_the_records_numbers_and_both_commands(crmatch: Command, trained: Trained, tmp_path: Path) -> None:
    page = write(crmatch, tmp_path / "r.html", trained.run, "--data-dir", trained.data_dir)
    record = read_record(trained.run)
    assert f"{record.error:.2f} <small>%" in page
    assert f"{describe_interval(record.error, record.test_images)}, accuracy {100 - record.error:.2f} %" in page
    sections = ("Confusion", "Error by class", "Pseudo-label quality", "Least certain images", "Calibration", "Loss terms")
    commands = (f"crmatch report {trained.run}", "crmatch train stripes@2", '"filters": 4')
    for text in (*sections, *commands, record.machine["versions"]["torch"]):
        assert text in html.unescape(page)
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert "url(" not in page


def test_the_supervised_run_beside_it_is_found_and_compared(
    crmatch: Command, tmp_path: Path, stripes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, alone = (train_tiny(tmp_path / "runs", stripes, method) for method in ("crmatch", "supervised"))
    train_tiny(tmp_path / "runs", stripes, "supervised", **{"plan.steps": 10})
    train_tiny(tmp_path / "runs", stripes, "supervised", split=2)
    record, baseline = read_record(ours), read_record(alone)
    assert find_baseline(ours, record, {ours: record}) == (baseline, alone, "")
    assert find_baseline(alone, baseline, {ours: record}) is None
    shorter = {path: one for path in (tmp_path / "runs").rglob("split1-seed0") if (one := read_record(path)).steps == 10}
    other = find_baseline(tmp_path / "elsewhere" / "a" / "b", record, shorter)
    assert other is not None
    assert other.differs == "plan.steps 10"
    monkeypatch.chdir(tmp_path)  # by default the page is about all runs below `runs`
    answer = json.loads(crmatch("report", "--data-dir", stripes, "--json").out)
    assert (answer["report"], len(answer["runs"])) == ("report.html", 4)
    page = Path("report.html").read_text()
    assert f"by {abs(baseline.error - record.error):.2f} percentage points compared with the 6 labels alone" in page
    assert all(f'href="#run-{number}"' in page and f'id="run-{number}"' in page for number in (1, 2, 3, 4))


def test_hostile_class_names_and_paths_are_text(crmatch: Command, tmp_path: Path) -> None:
    data_dir = stripes_in(tmp_path / "data", class_names=np.array(HOSTILE_NAMES))
    run = train_tiny(tmp_path / 'a <b onclick="x">&\'ü', data_dir)
    page = write(crmatch, tmp_path / "r.html", run, "--data-dir", data_dir)
    for name in (*HOSTILE_NAMES, str(run)):
        assert html.escape(name).replace("&quot;", "&#34;").replace("&#x27;", "&#39;") in page
    assert "<script" not in page
    assert "<b onclick" not in page


def test_a_run_whose_data_are_gone_still_has_its_page(crmatch: Command, trained: Trained, tmp_path: Path) -> None:
    page = write(crmatch, tmp_path / "r.html", trained.run, "--data-dir", tmp_path)
    assert "Pictures and calibration are left out: unknown data set &#39;stripes&#39;" in page
    assert "Most confident mistakes" not in page
    assert "Test error" in page


@pytest.mark.process
def test_a_run_without_a_test_set_shows_its_least_certain_unlabeled_images(crmatch: Command, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "my photos", labeled=4, unlabeled=12)
    run = train_tiny(tmp_path / "runs", tmp_path / "cache", setting=str(folder))
    page = write(crmatch, tmp_path / "r.html", run, "--data-dir", tmp_path / "cache")
    assert "no test set" in page
    assert "Unlabeled images with the lowest confidence" in page
    assert "<h3>Error by class" not in page
    assert "Pseudo-labels used" in page  # how good they are, nobody knows
    assert "true classes" not in page
    links = re.findall(r'<a href="(file://[^"]+)" title="(unlabeled/\d\d\.jpg)"><bdi>(\d\d\.jpg)</bdi></a>', page)
    assert len(links) == 12
    assert all(Path(url2pathname(link.removeprefix("file://"))) == folder / path for link, path, _ in links)
    record = json.loads((run / "record.json").read_text())  # a frozen backbone's record has an estimate
    (run / "record.json").write_text(json.dumps(record | {"cross_validation": {"error": 25.0, "labels": 4}}))
    page = write(crmatch, tmp_path / "r.html", run, "--data-dir", tmp_path / "cache")
    assert f"{describe_interval(25, 4)}, accuracy 75.00 %" in page
    assert "Estimated by cross-validation over 4 labels" in page


@pytest.mark.process
def test_mistakes_on_test_pictures_name_their_files_and_full_classes(crmatch: Command, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", labeled=4, unlabeled=8, test=20)
    long_name = "a very long name of a class, longer than any picture is wide & <wider>"
    for part in ("labeled", "test"):
        (folder / part / "down").rename(folder / part / long_name)
    run = train_tiny(tmp_path / "runs", tmp_path / "cache", setting=str(folder), **{"plan.steps": 4})
    page = write(crmatch, tmp_path / "r.html", run, "--data-dir", tmp_path / "cache")
    mistakes = page.partition("Most confident mistakes")[2].partition("</section>")[0]
    shown = re.findall(
        r'title="test/([^"]+)/(\d\d)\.jpg"><bdi>\d\d\.jpg</bdi></a>.*?true: <bdi>([^<]+)</bdi>', mistakes, re.DOTALL
    )
    record = read_record(run)
    assert record.error
    assert len(shown) == round(record.error / 100 * record.test_images)
    for directory, number, truth in shown:
        assert html.unescape(directory) == html.unescape(truth) == ("across", long_name)[int(number) % 2]


def test_a_curve_of_one_evaluation_is_a_point() -> None:
    chart = line_chart("title", [Series("one", [(50, 20.0)], 3), Series("many", [(0, 40.0), (100, 0.0)], 1)])
    macros = Environment(loader=PackageLoader("crmatch.report"), autoescape=True).get_template("macros.html").module
    drawn = macros.chart(chart)  # type: ignore[attr-defined]
    assert '<path class="line point s3" d="M50.00,50.00h0">' in drawn
    assert drawn.count("<polyline") == 1


def test_runs_are_named_by_what_differs(tmp_path: Path) -> None:
    paths = [tmp_path / "photos" / name / "split1-seed0" for name in ("round1", "round2")]
    assert list(short_names(paths).values()) == ["round1", "round2"]
    assert list(short_names(paths[:1]).values()) == ["photos/round1/split1-seed0"]
    assert list(short_names([paths[0], paths[0].with_name("split2-seed0")]).values()) == ["split1-seed0", "split2-seed0"]
    other = tmp_path / "elsewhere" / "photos" / "round1" / "split1-seed0"
    assert list(short_names([paths[0], other]).values()) == [str(paths[0]), str(other)]


def test_many_classes_become_a_picture_and_pages_stay_small(crmatch: Command, digits_run: Path, tmp_path: Path) -> None:
    data_dir = stripes_in(tmp_path / "data", classes=40, per_class=4, side=40)
    run = train_tiny(tmp_path / "runs", data_dir, **{"data.image_size": 16, "plan.steps": 3})
    page = write(crmatch, tmp_path / "r.html", run, "--data-dir", data_dir)
    assert 'alt="confusion matrix of 40 classes"' in page
    assert "20 more classes" in page
    assert len(page) < 1_000_000
    page = write(crmatch, tmp_path / "digits.html", digits_run)
    assert "Most confident mistakes" in page
    assert len(page.encode()) < 3_000_000


def test_wrong_requests_are_answered_in_two_lines(crmatch: Command, trained: Trained, tmp_path: Path) -> None:
    missing = crmatch("report", tmp_path)
    assert (missing.code, len(missing.err.splitlines())) == (3, 2)
    assert "there is no finished run in" in missing.err
    directory = crmatch("report", trained.run, "--out", tmp_path)
    assert directory.code == 2
    assert "is a directory" in directory.err


def test_keys_that_differ_from_the_papers_recipe_are_marked() -> None:
    setting = parse_setting("cifar10@4")
    assert all(row["paper"] is None for row in spec_rows(recipe(setting, "crmatch", "paper"), setting))
    rows = spec_rows(recipe(setting, "crmatch", "quick"), setting)
    marked = {row["name"]: (row["value"], row["paper"]) for row in rows if row["paper"]}
    assert marked["labeled_batch_size"] == ("16", "64")
    assert "threshold" not in marked


def test_mistakes_and_uncertain_images_equal_loops() -> None:
    random = np.random.default_rng(0)
    probabilities, labels = torch.from_numpy(random.dirichlet([0.4] * 4, 200)), torch.from_numpy(random.integers(0, 4, 200))
    wrong = sorted(
        (-float(row.max()), place) for place, row in enumerate(probabilities) if int(row.argmax()) != int(labels[place])
    )
    assert confident_mistakes(probabilities, labels, 7).tolist() == [place for _, place in wrong[:7]]
    uncertain = sorted((float(row.max()), place) for place, row in enumerate(probabilities))
    assert least_certain(probabilities, 5).tolist() == [place for _, place in uncertain[:5]]


def test_charts_place_values_in_percent_of_round_axes() -> None:
    chart = line_chart("title", [Series("a", [(0, 0.0), (50, 20.0), (100, 40.0)], 1), Series("none", [], 2)])
    assert chart is not None
    assert [line.points for line in chart.lines] == ["0.00,100.00 50.00,50.00 100.00,0.00"]
    assert [text for _, text in chart.y_ticks] == ["0", "10", "20", "30", "40"]
    assert line_chart("empty", [Series("none", [], 1)]) is None
    assert round_marks(0, 0.93) == [0, 0.5, 1.0]
    assert round_marks(-0.2, 7) == [-2, 0, 2, 4, 6, 8]


def contrast(first: str, second: str) -> float:
    def luminance(color: str) -> float:
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_contrast_with_their_background(theme: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", CSS.read_text(), re.DOTALL)
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[theme]))
    for name in ("ink", "soft", *(f"c{number}" for number in range(1, 9))):
        assert contrast(colors[name], colors["card"]) >= 4.5, name
    assert contrast(colors["soft"], colors["paper"]) >= 4.5
    assert contrast(colors["mark-ink"], colors["mark"]) >= 4.5
