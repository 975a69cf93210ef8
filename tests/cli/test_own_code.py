"""Methods, data sets and networks from files outside the package: docs/own-method.md, and what happens without the files."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from crmatch import own_code
from crmatch.errors import RequestError
from crmatch.methods import method_class
from crmatch.methods.base import StoredMethod
from crmatch.runs.finished import records

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "own-method.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"Save it as\n?\s*`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```\n(crmatch .*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
TINY = ["--steps", "4", "--set", "network.filters=4", "--set", "plan.unlabeled_batch_size=16"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the page's files, in a process that has named none of them."""
    monkeypatch.chdir(tmp_path)
    forget(monkeypatch)
    for name, content in FILES.items():
        Path(name).write_text(content, encoding="utf-8")
    return tmp_path


def forget(monkeypatch):
    """As in a new process: no file was named yet."""
    monkeypatch.setattr(own_code, "_files", {})
    monkeypatch.setattr(own_code, "_objects", {})


def test_the_page_runs_as_printed_from_files_to_the_table(folder, crmatch):
    assert set(FILES) == {"entmin.py", "shapes.py", "small.py"}
    assert 20 <= len(FILES["entmin.py"].splitlines()) <= 30
    assert len(COMMANDS) == 10
    said = {}
    for command in COMMANDS:
        said[command] = outcome = crmatch(*shlex.split(command)[1:])
        assert outcome.code == 0, (command, outcome)
    (latex,) = [outcome.out for command, outcome in said.items() if "latex" in command]
    assert re.search(r"Entropy minimization & .*\d+\.\d\d", latex)
    assert len(records(folder / "runs")) == 8
    assert "Entropy minimization" in Path("report.html").read_text(encoding="utf-8")


def test_runs_are_shown_without_the_files_and_nothing_is_imported(folder, crmatch, monkeypatch):
    train = ["train", "shapes.py:bars@4", "--method", "entmin.py:EntMin", *TINY]
    trained = json.loads(crmatch(*train, "--json").out)
    assert trained["spec"]["method"]["code"].startswith("entmin.py:EntMin#")
    again = json.loads(crmatch(*train, "--json").out)
    assert again["machine"] == trained["machine"]  # the finished record, not a second training
    for name in FILES:  # files of the same names that must not be imported
        Path(name).write_text("raise SystemExit('imported')")
    forget(monkeypatch)
    listed = json.loads(crmatch("runs", "--json").out)["rows"]
    assert [(row["method"], row["setting"]) for row in listed] == [("entmin.py:EntMin", "shapes.py:bars@4")]
    assert crmatch("report").code == 0
    assert "entmin.py:EntMin" in Path("report.html").read_text(encoding="utf-8")
    (record,) = records("runs").values()
    assert isinstance(record.spec.method, StoredMethod)
    assert record.spec.method.entropy_weight == 0.3
    for name in FILES:
        Path(name).unlink()
    cells = json.loads(
        crmatch("table", "--methods", "entmin.py:EntMin", "--settings", "shapes.py:bars@4", "--format", "json").out
    )["cells"]
    assert cells[0]["mean"] == record.error


def test_a_run_of_an_own_method_resumes_to_the_same_result(folder, crmatch):
    from crmatch.errors import StoppedError
    from crmatch.runs.run import run
    from crmatch.spec.recipes import recipe
    from crmatch.spec.run_spec import replace

    tiny = {"plan.steps": 4, "network.filters": 4, "plan.unlabeled_batch_size": 16}
    spec = replace(recipe("digits@4", "entmin.py:EntMin"), **tiny)
    whole, calls = run(spec, "whole"), iter([False, False, True])
    with pytest.raises(StoppedError):
        run(spec, "parts", stop=lambda: next(calls))
    assert run(spec, "parts").raw == whole.raw


def test_own_data_and_networks_need_their_file_named(folder, crmatch, monkeypatch):
    trained = crmatch("train", "shapes.py:bars@4", "--network", "small.py:small", "--steps", 4, "--name", "mine")
    assert trained.code == 0, trained
    assert "runs/shapes.bars@4/mine/split1-seed0" in trained.out
    forget(monkeypatch)
    refused = crmatch("evaluate", "latest")
    assert refused.code == 2
    assert "--code small.py" in refused.err
    Path("small.py").write_text(FILES["small.py"] + "\n")
    assert "has changed" in crmatch("evaluate", "latest", "--code", "small.py").err
    Path("small.py").write_text(FILES["small.py"])
    assert crmatch("evaluate", "latest", "--code", "small.py", "--code", "shapes.py").code == 0


def test_values_of_a_method_are_listed_and_its_usual_ones_are_tabulated_without_its_file(folder, crmatch, monkeypatch):
    train = ["train", "digits@4", "--method", "entmin.py:EntMin", *TINY]
    usual = [json.loads(crmatch(*train, "--split", split, "--json").out)["error"] for split in (1, 2)]
    assert crmatch(*train, "--set", "method.entropy_weight=0.9").code == 0
    Path("entmin.py").unlink()
    forget(monkeypatch)
    listed = json.loads(crmatch("runs", "--changed", "entropy_weight=0.9", "--json").out)["rows"]
    assert len(listed) == 1
    table = ["table", "--methods", "entmin.py:EntMin", "--settings", "digits@4", "--splits", "1-2", "--format", "json"]
    for records_of in ([], ["--records", "runs"]):  # also if the folder of runs is read as a folder of records
        (cell,) = json.loads(crmatch(*table, *records_of).out)["cells"]
        assert cell["mean"] == pytest.approx(sum(usual) / 2)


def test_a_changed_file_is_another_run(folder, crmatch):
    names = []
    for line in ("", "\n# another version\n"):
        with open("entmin.py", "a", encoding="utf-8") as file:
            file.write(line)
        names.append(json.loads(crmatch("train", "digits@4", "--method", "entmin.py:EntMin", *TINY, "--json").out)["run"])
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    ("content", "reference", "told"),
    [
        ("class X: pass", "mine.py:X", "crmatch.Method"),
        ("from crmatch import Method\nclass X(Method): pass", "mine.py:X", "loss, views"),
        ("x = 1", "mine.py:X", "has no X"),
        ("import nonsense_module", "mine.py:X", "line 1"),
        ("def x(:", "mine.py:X", "line 1"),
        ("import neighbor", "mine.py:X", "neighbor.py, line 3"),
        ("import sys\nsys.exit()", "mine.py:X", "line 2: SystemExit"),
        (None, "nowhere.py:X", "nowhere.py"),
    ],
)
def test_wrong_methods_are_explained(folder, crmatch, content, reference, told):
    if content is not None:
        Path("mine.py").write_text(content)
    Path("neighbor.py").write_text("\n\ndef x(:")
    outcome = crmatch("train", "digits@4", "--method", reference)
    assert outcome.code == 2
    assert told in outcome.err
    assert len(outcome.err.splitlines()) == 2


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def make(): return 1", "returned a int"),
        ("import numpy as np\ndef make(): return np.zeros((4, 9, 9)) + 7, np.arange(4)", "floats from 0 to 1"),
        ("import numpy as np\ndef make(): return np.zeros((4, 9, 9)), np.arange(4) + 2", "from 0"),
        ("import numpy as np\ndef make(): return np.zeros((4, 9, 9)), np.arange(3)", "(3,)"),
    ],
)
def test_wrong_data_sets_are_explained(folder, crmatch, code, told):
    Path("mine.py").write_text(code)
    outcome = crmatch("train", "mine.py:make@1")
    assert outcome.code in (2, 3)
    assert told in outcome.err


def test_a_network_must_make_feature_maps(folder, crmatch):
    Path("mine.py").write_text("from torch import nn\ndef flat(channels): return nn.Flatten()")
    outcome = crmatch("train", "digits@4", "--network", "mine.py:flat", "--steps", 2)
    assert outcome.code == 2
    assert "feature map" in outcome.err


def test_installed_methods_are_found_by_their_entry_point(folder, crmatch, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    point = EntryPoint("entropy", "entmin:EntMin", "crmatch.methods")
    monkeypatch.setattr("crmatch.methods.entry_points", lambda group: [point])
    assert "entropy" in crmatch("show", "methods").out
    record = json.loads(crmatch("train", "digits@4", "--method", "entropy", *TINY, "--json").out)
    assert record["spec"]["method"]["name"] == "entropy"
    assert record["spec"]["method"]["code"].startswith("entmin:EntMin#")
    with pytest.raises(RequestError, match="entropy"):
        method_class("entropyy")


def test_a_record_of_an_unknown_method_is_not_called_damaged(digits_run, tmp_path, crmatch):
    run = tmp_path / "runs" / "digits@4" / "other" / "split1-seed0"
    run.mkdir(parents=True)
    for name in ("record.json", "spec.json"):
        values = json.loads((digits_run / name).read_text())
        values.get("spec", values)["method"] = {"name": "of_tomorrow", "strength": 3}
        (run / name).write_text(json.dumps(values))
    assert "of_tomorrow" in crmatch("runs", tmp_path / "runs").out
    reported = crmatch("report", tmp_path / "runs", "--out", tmp_path / "report.html")
    assert reported.code == 0, reported
    assert "strength" in (tmp_path / "report.html").read_text(encoding="utf-8")
