"""Which forward pass updates the running statistics of batch norms: a declared property of each method, true of its passes."""

from __future__ import annotations

import copy

import pytest
import torch
from kit import NORMS, make, make_batch, make_models, make_step, record_passes, running_statistics, same, take

from crmatch.methods import METHODS
from crmatch.methods.base import Models
from crmatch.networks.batch_norm import forward_without_bn_update

DECLARED = {
    **dict.fromkeys(("mean_teacher", "pi_model", "pseudo_label", "vat", "ict"), "labeled"),
    **dict.fromkeys(("mixmatch", "remixmatch", "featmatch", "plcb"), "mixed"),
    **dict.fromkeys(("label_propagation", "uda", "fixmatch", "crmatch", "supervised"), "all"),
    **dict.fromkeys(("flexmatch", "freematch", "softmatch", "adamatch"), "all"),
}
SMALL = {"crmatch": {"rotation_weight": 0}}
CASES = [*((name, SMALL.get(name, {})) for name in METHODS)]
INTERLEAVED = [(name, {"mixed_pass": "interleaved"}) for name in ("mixmatch", "remixmatch")]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_exactly_the_declared_pass_updates_running_statistics(name, changes):
    method = make(name, changes)
    case = take(method)
    (updating,) = [record for record in case.passes if record.updated_statistics]
    assert updating.network == "student"
    assert method.running_statistics == DECLARED[name]
    views = case.batch.views
    if method.running_statistics == "labeled":
        assert torch.equal(updating.images, views["labeled"])
    elif method.running_statistics == "all":
        assert torch.equal(updating.images, torch.cat([views[view.name] for view in method.views]))
        assert len(case.passes) == 1
    else:
        assert len(updating.images) == sum(len(images) for images in views.values())


@pytest.mark.parametrize(("name", "changes"), INTERLEAVED)
def test_only_the_first_of_the_interleaved_passes_updates_running_statistics(name, changes):
    passes = [record for record in take(make(name, changes)).passes if record.with_gradient]
    assert [record.updated_statistics for record in passes] == [True] + [False] * (len(passes) - 1)
    assert len(passes) > 2


@pytest.mark.parametrize(("name", "changes"), CASES + INTERLEAVED)
def test_every_pass_uses_the_statistics_of_its_own_batch_and_the_teacher_gets_no_gradient(name, changes):
    method = make(name, changes)
    models = make_models(method)
    before = copy.deepcopy(models)
    case = take(method, models=models)
    for record in case.passes:
        assert record.training
        assert record.with_gradient or record.network == "teacher" or not record.outputs.logits.requires_grad
        with torch.no_grad():
            logits = copy.deepcopy(getattr(before, record.network)).train()(record.images.detach()).logits
        assert same(logits, record.outputs.logits.detach())
    assert not any(record.with_gradient for record in case.passes if record.network == "teacher")
    case.found.total.backward()
    assert all(parameter.grad is None for parameter in models.teacher.parameters())


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_running_statistics_are_updated_once_per_step_and_those_of_the_teacher_never(name, changes):
    method = make(name, changes)
    models = make_models(method)
    teacher = running_statistics(models.teacher)
    for number in range(3):
        method.loss(make_batch(method, seed=number), models, make_step(number))
    tracked = [module.num_batches_tracked.item() for module in models.student.modules() if isinstance(module, NORMS)]
    assert set(tracked) == {3}
    assert torch.equal(running_statistics(models.teacher), teacher)
    assert models.student.training
    assert not models.teacher.training
    assert all(module.track_running_stats for model in models for module in model.modules() if isinstance(module, NORMS))


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_without_update_uses_batch_statistics_and_leaves_the_network_as_it_was(training):
    method = make("supervised")
    network, images = make_models(method).student.train(training), make_batch(method).views["labeled"]
    expected = copy.deepcopy(network).train()(images)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    found = forward_without_bn_update(network, images)
    assert same(found.logits.detach(), expected.logits.detach())
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert network.training == training


def test_a_pass_without_update_that_fails_leaves_the_network_as_it_was():
    network = make_models(make("supervised")).student.eval()
    with pytest.raises(RuntimeError):
        forward_without_bn_update(network, torch.zeros(2, 5, 8, 8, dtype=torch.float64))
    assert not network.training
    assert all(module.track_running_stats for module in network.modules() if isinstance(module, NORMS))


def test_the_record_itself_sees_a_pass_that_updates_statistics():
    models = make_models(make("supervised"))
    passes = record_passes(Models(*models))
    images = make_batch(make("supervised")).views["labeled"]
    models.student(images)
    forward_without_bn_update(models.student, images)
    models.student.eval()(images)
    assert [(record.updated_statistics, record.training) for record in passes] == [(True, True), (False, True), (False, False)]
