"""The guide for own pictures: every command runs as it is printed."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import TINY, Outcome
from crmatch.spec import recipes
from crmatch.spec.run_spec import replace
from finished import write_photos

GUIDE = Path(__file__).parents[2] / "docs" / "your-own-images.md"
COMMANDS = [
    line
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if not language and line.startswith("crmatch ")
]


@pytest.mark.process
def test_every_command_of_the_guide_runs_as_printed(
    crmatch: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path / "cache"))
    # The recipe as printed would train for minutes: here it is shorter and smaller, and everything else is as printed.
    quick, small = recipes.RECIPES["quick"], {**TINY, "plan.evaluate_every": 10}
    monkeypatch.setitem(recipes.RECIPES, "quick", lambda *arguments: replace(quick(*arguments), **small))
    write_photos(tmp_path / "my-photos", labeled=4, test=6, unlabeled=20)
    write_photos(tmp_path, **{"new-photos": 5})
    (tmp_path / "labels.csv").write_text("path,label\nunlabeled/10.jpg,across\n")
    assert len(COMMANDS) == 9
    for command in COMMANDS:
        if "onnx" in command and not importlib.util.find_spec("onnxruntime"):
            continue
        outcome = crmatch(*shlex.split(command)[1:])
        assert outcome.code == 0, f"{command}: {outcome.err}"
        assert all((text in outcome.err) == ("train" in command) for text in ("augmentation.mirror=false", "on two cores"))
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 6
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("record.json"))]
    assert sorted(record["labeled_images"] for record in records) == [4, 4, 5, 5]
