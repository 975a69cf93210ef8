"""The report in a real browser: no request to the network, no error, no overflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import chromium

from crmatch.report.page import write_report
from crmatch.runs.workspace import Workspace
from finished import HOSTILE_NAMES, stripes_in, train_tiny

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two runs whose names are as hostile as names can be."""
    folder = tmp_path_factory.mktemp("browser")
    long_name = f"{HOSTILE_NAMES[0]}{'x' * 80}"
    data_dir = stripes_in(folder / "data", class_names=np.array([long_name, *HOSTILE_NAMES[1:]]))
    runs = [train_tiny(folder / "runs <i>&ü", data_dir, method) for method in ("crmatch", "supervised")]
    write_report(runs, folder / "report & <page>.html", "crmatch report 'x'", Workspace(folder, data_dir))
    return folder / "report & <page>.html"


def show(browser: Any, page: Path, width: int, theme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())


def test_the_page_makes_no_request_logs_no_error_and_shows_names_as_text(browser: Any, page: Path) -> None:
    browser.get_log("performance")
    show(browser, page, 1280, "light")
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert page.as_uri() in asked
    # chrome: and chrome-untrusted: are the pages of the browser itself, such as its start page.
    assert not [address for address in asked if address != page.as_uri() and not address.startswith(("data:", "chrome"))]
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.scripts.length") == 0
    text = browser.execute_script("return document.body.textContent")
    assert all(name in text for name in HOSTILE_NAMES)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_the_width(browser: Any, page: Path, width: int, theme: str) -> None:
    show(browser, page, width, theme)
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.execute_script("return window.innerWidth") == width
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")
    style = "return [...document.querySelectorAll('.matrix .cell')].map(one => getComputedStyle(one).whiteSpace)"
    assert {*browser.execute_script(style)} == {"nowrap"}  # a count is never broken into two lines
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(247, 247, 245)" if theme == "light" else "rgb(19, 21, 25)")


def test_the_printed_page_is_white_and_unfolded_even_with_a_dark_theme(browser: Any, page: Path) -> None:
    show(browser, page, 760, "dark")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    colors = browser.execute_script("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
    folded = browser.execute_script("return document.querySelector('table.spec').getBoundingClientRect().height")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert colors == ["rgb(255, 255, 255)", "rgb(27, 29, 33)"]
    assert folded > 500


def test_all_pictures_are_drawn(browser: Any, page: Path) -> None:
    show(browser, page, 390, "dark")
    widths = browser.execute_script("return [...document.images].map(one => one.naturalWidth)")
    assert len(widths) > 0
    assert min(widths) > 0
