"""The baseline: the mean cross-entropy of the labeled images, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from crmatch.augment.views import Batch, View
from crmatch.methods import Supervised
from crmatch.methods.base import Models, Step
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from reference import crmatch_formulas as reference

STEP = Step(0, 1, lambda stream: torch.Generator())
METHOD = Supervised()


class Untouched(nn.Module):
    """A teacher that no loss of this file may ask."""

    def forward(self, images):
        raise AssertionError("the teacher was asked")


def make_student():
    config = WideResNetConfig(filters=4, repeat=1)
    return build_network(config, channels=2, image_size=8, classes=3, heads=METHOD.heads).double()


def make_batch(images=6):
    views = {"labeled": torch.randn(images, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    return Batch(torch.arange(images) % 3, views, torch.arange(0))


def test_the_loss_equals_the_loop_over_labeled_images():
    student, batch = make_student(), make_batch()
    found = METHOD.loss(batch, Models(student, Untouched()), STEP)
    with torch.no_grad():
        logits = copy.deepcopy(student)(batch.views["labeled"]).logits.tolist()
    expected = reference.supervised_loss(batch.labels.tolist(), logits)
    assert list(found.terms) == ["supervised"]
    assert found.terms["supervised"].item() == pytest.approx(expected, rel=1e-10)
    assert found.total.item() == pytest.approx(reference.total_loss(expected), rel=1e-10)
    assert found.pseudo_labels is None


def test_one_pass_sees_the_labeled_images_only():
    student, batch = make_student(), make_batch()
    seen = []
    student.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    METHOD.loss(batch, Models(student, Untouched()), STEP)
    (images,) = seen
    assert torch.equal(images, batch.views["labeled"])


def test_it_asks_for_weak_views_of_labeled_images_and_for_no_head():
    assert METHOD.views == (View("labeled", "labeled", "weak"),)
    assert METHOD.extra_batch_size == 0
    assert len(make_student().heads) == 0
