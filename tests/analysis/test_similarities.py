from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from conftest import Command, Trained
from crmatch.analysis.finished_run import draws, open_run
from crmatch.analysis.similarities import compare
from crmatch.errors import DataError
from crmatch.runs.workspace import Workspace
from finished import stripes_in


def loop(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    values = []
    for one, two in zip(first.tolist(), second.tolist(), strict=True):
        product = sum(a * b for a, b in zip(one, two, strict=True))
        values.append(product / math.sqrt(sum(a * a for a in one) * sum(b * b for b in two)))
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def test_similarities_equal_loops_over_images() -> None:
    random = torch.Generator().manual_seed(0)
    features = {name: torch.randn(9, 4, generator=random, dtype=torch.float64) for name in ("original", "weak", "strong")}
    result = compare(features)
    assert list(result) == ["weak-original", "strong-original", "weak-strong"]
    for pair, summary in result.items():
        first, second = pair.split("-")
        assert summary[:2] == pytest.approx(loop(features[first], features[second]))
        assert summary.n == 9


def test_the_command_compares_the_runs_own_views(crmatch: Command, trained: Trained) -> None:
    run, data_dir = trained
    answer = json.loads(crmatch("distances", run, "--data-dir", data_dir, "--json").out)
    finished = open_run(run, Workspace.at(data_dir=data_dir))
    images, features = finished.test.images, finished.model.features
    expected = loop(features(finished.weak(images, draws(0, "similarities/weak"))), features(images))
    assert (answer["weak-original"]["mean"], answer["weak-original"]["std"]) == pytest.approx(expected, rel=1e-5)
    table = crmatch("distances", run, "--data-dir", data_dir).out
    assert "strong-original" in table
    assert "±" in table


def test_changed_data_are_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="changed since it was trained"):
        open_run(trained.run, Workspace(tmp_path, stripes_in(tmp_path / "other", per_class=13)))
