from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import Command, Trained
from crmatch.analysis import toy
from crmatch.analysis.curves import class_spread, summarize, threshold_curve
from crmatch.analysis.embedding import embed
from crmatch.errors import DataError, RequestError
from crmatch.runs.finished import find_runs, read_record
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import replace
from finished import train_tiny


def test_curves_are_those_of_the_metrics_and_need_pseudo_labels(crmatch: Command, trained: Trained, tmp_path: Path) -> None:
    run, data_dir = trained
    answer = json.loads(crmatch("figure", "curves", run, "--out", tmp_path / "c.png", "--json").out)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for key in ("pseudo_label_error", "contributing_error", "mask_rate"):
        expected = [[line["step"], line[key]] for line in lines if line[key] is not None]
        assert answer["curves"][str(run)].get(key, []) == expected
    with Image.open(tmp_path / "c.png") as picture:
        assert min(picture.size) > 500
    outcome = crmatch("figure", "curves", train_tiny(tmp_path, data_dir, "supervised"), "--out", tmp_path / "c.png")
    assert outcome.code == 2
    assert "has no pseudo-label curves" in outcome.err


def test_error_over_threshold_is_grouped_over_splits(trained: Trained) -> None:
    record = read_record(trained.run)

    def changed(error: float, **keys: object) -> object:
        errors = record.ema.model_copy(update={"last": error})
        return record.model_copy(update={"ema": errors, "spec": replace(record.spec, **keys)})

    records = [
        changed(30.0, **{"method.threshold": 0.97}),
        changed(10.0, **{"method.threshold": 0.9}),
        changed(14.0, **{"method.threshold": 0.9, "split": 2}),
    ]
    curve = threshold_curve(records)
    assert list(curve) == [0.9, 0.97]
    assert curve[0.9] == (12.0, pytest.approx(8**0.5), 2)
    assert curve[0.97] == (30.0, 0.0, 1)
    with pytest.raises(RequestError, match=r"threshold, split and seed only, found plan\.steps"):
        threshold_curve([*records, changed(1.0, **{"plan.steps": 21})])


def test_the_threshold_figure_is_drawn_in_a_known_format_only(crmatch: Command, trained: Trained, tmp_path: Path) -> None:
    outcome = crmatch("figure", "threshold", trained.run, "--out", tmp_path / "deep" / "t.svg")
    assert outcome.code == 0, outcome.err
    assert "<svg" in (tmp_path / "deep" / "t.svg").read_text()
    outcome = crmatch("figure", "threshold", trained.run, "--out", tmp_path / "t.xyz")
    assert outcome.code == 2
    assert "Use .png, .svg or .pdf" in outcome.err


def test_tsne_shows_the_same_unlabeled_images_for_all_models(crmatch: Command, trained: Trained, tmp_path: Path) -> None:
    run, data_dir = trained
    out = tmp_path / "t.png"
    answer = json.loads(crmatch("figure", "tsne", run, run, "--data-dir", data_dir, "--out", out, "--json").out)
    assert answer["images"] == 30
    assert out.stat().st_size > 1000
    workspace = Workspace.at(data_dir=data_dir)
    two = embed([run, run], workspace, ["stripe 2", "stripe 0"])
    assert np.array_equal(two.points[0], two.points[1])
    assert np.bincount(two.labels).tolist() == [10, 10]
    assert two.class_names == ["stripe 2", "stripe 0"]
    with pytest.raises(RequestError, match="Did you mean 'stripe 1'"):
        embed([run], workspace, ["strip 1"])
    with pytest.raises(RequestError, match="other unlabeled images"):
        embed([run, train_tiny(tmp_path / "runs", data_dir, split=2)], workspace)


def test_the_toys_features_are_pulled_together_and_pushed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weak and strong features of a point are closer when pulled than when pushed, relative to the spread of all."""
    monkeypatch.setattr(toy, "STEPS", 250)

    def distance(mode: toy.Mode) -> float:
        trained = toy.train_toy(mode)
        between = np.linalg.norm(trained.weak - trained.strong, axis=1).mean()
        return float(between / np.concatenate([trained.weak, trained.strong]).std())

    assert distance("pull") < distance("push")
    pushed = toy.train_toy("push")
    assert np.array_equal(pushed.weak, toy.train_toy("push").weak)
    assert pushed.error < 50
    above = pushed.weak @ pushed.boundary[:2] + pushed.boundary[2] > 0
    assert np.mean(above == (pushed.labels == 1)) > 0.6


def test_the_teaser_is_drawn(crmatch: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toy, "STEPS", 20)
    answer = json.loads(crmatch("figure", "teaser", "--seeds", 2, "--out", tmp_path / "t.png", "--json").out)
    assert {mode: one["n"] for mode, one in answer["errors"].items()} == {"none": 2, "pull": 2, "push": 2}
    with Image.open(tmp_path / "t.png") as picture:
        assert picture.width > 2 * picture.height


def test_spread_over_classes_is_that_of_a_population() -> None:
    assert class_spread([10.0, None, 30.0, 50.0]) == pytest.approx((2 * 400 / 3) ** 0.5)
    assert class_spread([]) is None
    assert summarize([3.0]) == (3.0, 0.0, 1)


def test_runs_are_found_below_directories_each_once(trained: Trained, tmp_path: Path) -> None:
    run = trained.run
    assert find_runs([run.parent.parent, run]) == [run]
    with pytest.raises(DataError, match="no finished run"):
        find_runs([tmp_path])
    with pytest.raises(DataError, match="not a finished run"):
        read_record(tmp_path)
