"""Every method at its paper's batch sizes, with WRN-28-2 on 32x32 images: two steps (minutes, gigabytes)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import training_of, write_packed
from crmatch.data.settings import parse_setting
from crmatch.methods import METHODS
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace

FULL_RATIO = {"crmatch", "fixmatch", "uda", "flexmatch", "freematch", "softmatch", "adamatch", "supervised"}
OLDER = {"mean_teacher", "pi_model", "pseudo_label", "vat", "ict", "mixmatch", "remixmatch"}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_two_steps_at_the_papers_batch_sizes(tmp_path: Path, method: str) -> None:
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
