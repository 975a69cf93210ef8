"""The guide for one's own pictures: every command runs as it is printed."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import TINY, Outcome

GUIDE = Path(__file__).parents[2] / "docs" / "your-own-images.md"
COMMANDS = [
    line
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if not language and line.startswith("crmatch ")
]


def write_photos(folder: Path) -> None:
    """Pictures of two classes, brighter left or brighter above: 4 labeled, 20 unlabeled, 6 for testing; and 5 new ones."""
    random = np.random.default_rng(0)
    for number in range(35):
        kind = ("across", "down")[number % 2]
        pixels = random.integers(0, 90, (24, 30, 3), dtype=np.uint8)
        pixels[(slice(12), slice(None)) if number % 2 else (slice(None), slice(15))] += 120
        where = "my-photos/labeled" if number < 4 else "my-photos/test" if number < 10 else "my-photos/unlabeled"
        place = folder / ("new-photos" if number >= 30 else f"{where}/{kind}" if number < 10 else where)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:02d}.jpg")


def test_every_command_of_the_guide_runs_as_printed(
    crmatch: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path / "cache"))
    # The recipe as printed would train for minutes: here it is shorter and smaller, and everything else is as printed.
    from crmatch.spec import recipes
    from crmatch.spec import run_spec as config

    quick = recipes.RECIPES["quick"]
    small = {**TINY, "plan.evaluate_every": 10}
    monkeypatch.setitem(recipes.RECIPES, "quick", lambda *arguments: config.replace(quick(*arguments), **small))
    write_photos(tmp_path)
    (tmp_path / "labels.csv").write_text("path,label\nunlabeled/10.jpg,across\n")
    assert len(COMMANDS) == 9
    for command in COMMANDS:
        if "onnx" in command and not importlib.util.find_spec("onnxruntime"):
            continue
        outcome = crmatch(*shlex.split(command)[1:])
        assert outcome.code == 0, f"{command}: {outcome.err}"
        assert ("mirror images count as the same class" in outcome.err) == ("train" in command)
        assert ("on two cores" in outcome.err) == ("train" in command)
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 6
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("record.json"))]
    assert sorted(record["labeled_images"] for record in records) == [4, 4, 5, 5]
