"""Names of runs: `--name`, `latest`, a folder with one run, and the list of runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TINY = ["--steps", "4", "--set", "network.filters=4", "--set", "plan.unlabeled_batch_size=16"]


@pytest.fixture
def two_runs(tmp_path, monkeypatch, crmatch):
    monkeypatch.chdir(tmp_path)
    for method, options in (("supervised", []), ("crmatch", ["--name", "first"])):
        assert crmatch("train", "digits@4", "--method", method, *TINY, *options).code == 0
    return [Path("runs/digits@4/supervised-filters=4,steps=4,unlabeled_batch_size=16"), Path("runs/digits@4/first")]


def test_runs_are_named_listed_and_found(two_runs, crmatch):
    supervised, named = two_runs
    os.utime(supervised / "split1-seed0" / "record.json", (1e9, 1e9))  # 2001-09-09
    rows = json.loads(crmatch("runs", "--json").out)["rows"]
    assert [Path(row["run"]).parent for row in rows] == two_runs
    assert rows[1]["differences"] == "filters=4, steps=4, unlabeled_batch_size=16"
    for chosen, kept in (
        (["--method", "crmatch"], [1]),
        (["--setting", "digits@5"], []),
        (["--changed", "steps=4"], [0, 1]),
        (["--since", "2020-01-01"], [1]),
        (["--below", "0"], []),
        ([named], [1]),
    ):
        found = json.loads(crmatch("runs", *chosen, "--json").out)["rows"]
        assert found == [rows[place] for place in kept], chosen
    for run in ("latest", "runs/latest", named, named / "split1-seed0"):
        assert str(named / "split1-seed0") in crmatch("evaluate", run).out
    several = crmatch("evaluate", "runs")
    assert several.code == 2
    assert "2 finished runs" in several.err
    assert "Supervised only" in crmatch("table", "--methods", "supervised", "--settings", "digits@4", *TINY).out
    other = crmatch("train", "digits@4", "--name", "first", "--steps", "5")
    assert other.code == 2
    assert "another spec" in other.err
    assert crmatch("train", "digits@4", "--name", "../up").code == 2


def test_a_short_run_is_evaluated_several_times(two_runs):
    lines = [json.loads(line) for line in (two_runs[1] / "split1-seed0" / "metrics.jsonl").read_text().splitlines()]
    assert sum("error/ema" in line for line in lines) == 4


def test_unfinished_runs_are_listed(two_runs, crmatch):
    (two_runs[1] / "split1-seed0" / "record.json").unlink()
    assert [row["state"] for row in json.loads(crmatch("runs", "--json").out)["rows"]].count("unfinished") == 1


def test_mistyped_names_get_a_guess(tmp_path, monkeypatch, crmatch, digits_run):
    monkeypatch.chdir(tmp_path)
    Path("my-photos").mkdir()
    assert "'my-photos'" in crmatch("train", "my-photo").err
    assert "Did you mean 0.8?" in crmatch("predict", digits_run, "x.png", "--abstain", "80").err
    assert "there is no directory nowhere" in crmatch("suggest", "nowhere").err
