"""Slow: two steps of every method at its paper's batch sizes, and methods with a memory against the baseline on digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import training_of, write_packed
from crmatch.data.settings import parse_setting
from crmatch.methods import METHODS
from crmatch.runs.run import run
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace

FULL_RATIO = {"crmatch", "fixmatch", "uda", "flexmatch", "freematch", "softmatch", "adamatch", "supervised"}
OLDER = {"mean_teacher", "pi_model", "pseudo_label", "vat", "ict", "mixmatch", "remixmatch"}
WITH_MEMORY = ("featmatch", "label_propagation", "plcb")


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_two_steps_of_wrn_28_2_on_32_pixel_images(tmp_path: Path, method: str) -> None:
    write_packed(tmp_path / "cifar10_stripes.npz", classes=10, per_class=60, side=32)
    papers = recipe(parse_setting("cifar10_stripes@25", tmp_path), method, "paper")
    spec = replace(papers, **{"plan.steps": 2, "plan.unlabeled_epochs": None})
    if method in FULL_RATIO | OLDER:
        assert spec.plan.labeled_batch_size == 64
        assert spec.plan.unlabeled_batch_size == (448 if method in FULL_RATIO else 64)
    training = training_of(spec, tmp_path)
    assert sum(parameter.numel() for parameter in training.network.backbone.parameters()) == 1_469_642 - 1_290
    for _ in range(2):
        _, loss = training.take_step()
        assert torch.isfinite(loss.total)


@pytest.mark.slow
@pytest.mark.parametrize("method", WITH_MEMORY)
def test_two_steps_of_resnet_18_on_84_pixel_images(tmp_path: Path, method: str) -> None:
    """The second step is after the warm-up or supervised stage. FeatMatch: 1,728 views at once, minutes, 6 GiB."""
    write_packed(tmp_path / "mini_imagenet_stripes.npz", classes=10, per_class=60, side=84)
    papers = recipe(parse_setting("mini_imagenet_stripes@25", tmp_path), method, "paper")
    assert papers.network.kind == "resnet18"
    training = training_of(replace(papers, **{"plan.steps": 2, "plan.unlabeled_epochs": None}), tmp_path)
    for _ in range(2):
        _, loss = training.take_step()
        assert torch.isfinite(loss.total)


@pytest.mark.slow
@pytest.mark.parametrize("method", WITH_MEMORY)
def test_it_beats_the_labels_alone_on_digits(tmp_path: Path, method: str) -> None:
    record = run(recipe(parse_setting("digits@4"), method, "quick"), tmp_path)
    assert record.error is not None
    assert record.error < 9  # supervised only: 10.2 on this split
