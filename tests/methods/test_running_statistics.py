"""Which forward pass moves the running statistics of batch norms: a declared property of each method, true of its passes."""

from __future__ import annotations

import copy

import pytest
import torch
from recorded_passes import (
    LABELED,
    NORMS,
    UNLABELED,
    make_batch,
    make_models,
    make_step,
    record_passes,
    running_state,
    same,
    take,
    uses_batch_statistics,
)

from crmatch.methods import METHODS, build_method
from crmatch.methods.base import Models
from crmatch.networks.batch_norm import forward_without_bn_update

SMALL = {"remixmatch": {"strong_views": 2}, "featmatch": {"strong_views": 2}, "crmatch": {"rotation_weight": 0}}
DECLARED = {
    "mean_teacher": "labeled",
    "pi_model": "labeled",
    "pseudo_label": "labeled",
    "vat": "labeled",
    "ict": "labeled",
    "mixmatch": "mixed",
    "remixmatch": "mixed",
    "featmatch": "mixed",
    "plcb": "mixed",
    "label_propagation": "all",
    "uda": "all",
    "fixmatch": "all",
    "crmatch": "all",
    "supervised": "all",
}
IMAGES = {
    "mean_teacher": LABELED + 2 * UNLABELED,
    "pi_model": LABELED + 2 * UNLABELED,
    "pseudo_label": LABELED + UNLABELED,
    "vat": LABELED + 3 * UNLABELED,
    "ict": LABELED + 2 * UNLABELED,
    "mixmatch": 2 * UNLABELED + (LABELED + 2 * UNLABELED),
    "remixmatch": UNLABELED + (LABELED + 3 * UNLABELED) + 2 * UNLABELED,
    "featmatch": (LABELED + UNLABELED) + 3 * (LABELED + UNLABELED),
    "plcb": (LABELED + UNLABELED) + (LABELED + UNLABELED),
    "label_propagation": LABELED + UNLABELED,
    "supervised": LABELED,
    **dict.fromkeys(("uda", "fixmatch", "crmatch", "flexmatch", "freematch", "softmatch", "adamatch"), LABELED + 2 * UNLABELED),
}
"""Images through student and teacher per step; methods of the last line see labeled, weak and strong images once."""


def make(name):
    return build_method(name, SMALL.get(name, {}))


@pytest.mark.parametrize("name", METHODS)
def test_exactly_the_declared_pass_moves_running_statistics(name):
    method = make(name)
    case = take(method)
    (moving,) = [record for record in case.passes if record.moved]
    assert moving.network == "student"
    assert method.running_statistics == DECLARED.get(name, method.running_statistics)
    views = case.batch.views
    if method.running_statistics == "labeled":
        assert torch.equal(moving.images, views["labeled"])
    elif method.running_statistics == "all":
        assert torch.equal(moving.images, torch.cat([views[view.name] for view in method.views]))
        assert len(case.passes) == 1
    else:
        assert len(moving.images) == sum(len(images) for images in views.values())


@pytest.mark.parametrize("name", METHODS)
def test_every_pass_uses_the_statistics_of_its_own_batch(name):
    method = make(name)
    models = make_models(method)
    before = copy.deepcopy(models)
    case = take(method, models=models)
    assert all(record.training for record in case.passes)
    assert all(uses_batch_statistics(record, before) for record in case.passes)


@pytest.mark.parametrize("name", METHODS)
def test_running_statistics_move_once_per_step_and_the_teacher_keeps_its_own(name):
    method = make(name)
    models = make_models(method)
    teacher = running_state(models.teacher)
    for number in range(3):
        method.loss(make_batch(method, seed=number), models, make_step(number))
    tracked = [module.num_batches_tracked.item() for module in models.student.modules() if isinstance(module, NORMS)]
    assert set(tracked) == {3}
    assert torch.equal(running_state(models.teacher), teacher)
    assert models.student.training
    assert not models.teacher.training
    assert all(module.track_running_stats for model in models for module in model.modules() if isinstance(module, NORMS))


@pytest.mark.parametrize(("name", "images"), IMAGES.items())
def test_no_method_sends_more_images_through_the_networks_than_its_paper_needs(name, images):
    case = take(make(name))
    assert sum(len(record.images) for record in case.passes) == images


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_apart_uses_batch_statistics_and_leaves_no_trace(training):
    method = make("supervised")
    network, images = make_models(method).student.train(training), make_batch(method).views["labeled"]
    expected = copy.deepcopy(network).train()(images)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = forward_without_bn_update(network, images)
    assert same(found.logits.detach(), expected.logits.detach())
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert network.training == training


def test_a_pass_apart_that_fails_leaves_the_network_as_it_was():
    network = make_models(make("supervised")).student.eval()
    with pytest.raises(RuntimeError):
        forward_without_bn_update(network, torch.zeros(2, 5, 8, 8, dtype=torch.float64))
    assert not network.training
    assert all(module.track_running_stats for module in network.modules() if isinstance(module, NORMS))


def test_the_record_itself_sees_a_pass_that_moves_statistics():
    network = make_models(make("supervised")).student
    passes = record_passes(Models(network, make_models(make("supervised")).teacher))
    images = make_batch(make("supervised")).views["labeled"]
    network(images)
    forward_without_bn_update(network, images)
    network.eval()(images)
    assert [(record.moved, record.training) for record in passes] == [(True, True), (False, True), (False, False)]
