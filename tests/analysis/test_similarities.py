from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import Outcome
from crmatch.analysis.finished_run import draws, open_run, pooled_features
from crmatch.analysis.similarities import compare

Command = Callable[..., Outcome]


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


def test_the_command_compares_the_runs_own_views(crmatch: Command, trained: tuple[Path, Path]) -> None:
    run, data_dir = trained
    answer = json.loads(crmatch("distances", run, "--data-dir", data_dir, "--json").out)
    finished = open_run(run, data_dir)
    images = finished.test.images
    weak = finished.weak(images, draws(0, "similarities/weak"))
    expected = loop(pooled_features(finished.model, weak), pooled_features(finished.model, images))
    assert (answer["weak-original"]["mean"], answer["weak-original"]["std"]) == pytest.approx(expected, rel=1e-5)
    table = crmatch("distances", run, "--data-dir", data_dir).out
    assert "strong-original" in table
    assert "±" in table


def test_a_learning_policy_comes_back_with_what_it_learned(tmp_path: Path, stripes: Path) -> None:
    from finished import train_tiny

    run = train_tiny(tmp_path / "runs", stripes, "fixmatch", **{"augmentation.policy": "ctaugment"})
    finished = open_run(run, stripes)
    assert finished.policy().rates() == finished.record.policy


def test_changed_data_are_refused(trained: tuple[Path, Path], tmp_path: Path) -> None:
    from crmatch.errors import DataError
    from finished import stripes_in

    with pytest.raises(DataError, match="changed since it was trained"):
        open_run(trained[0], stripes_in(tmp_path / "other", per_class=13))
