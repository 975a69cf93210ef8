"""VAT: predictions should not change along the direction in which they would change most."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from kit import (
    UNLABELED,
    assert_no_gradient,
    assert_rows,
    assert_terms,
    linear_models,
    make_batch,
    make_models,
    make_step,
    same,
    take,
)

from crmatch.augment.views import Batch
from crmatch.methods import VAT
from crmatch.methods.base import Models
from reference import baseline_formulas as reference

KINDS = {"convolutional": make_models, "linear": linear_models}


def probed_images(method, batch, number=7):
    """The images moved by xi along a Gaussian direction of length 1."""
    images = batch.views["weak"]
    noise = torch.randn(images.shape, generator=make_step(number).generator("vat"), dtype=torch.float32).double()
    directions = torch.stack([torch.from_numpy(reference.unit(image)) for image in noise.numpy()])
    return images + method.probe * directions


def adversarial_images(method, models, batch):
    """The images moved by epsilon along the gradient of the mean KL(p(u) || p(u + xi d)), in batch statistics."""
    student = copy.deepcopy(models.student).train()
    moved = probed_images(method, batch).requires_grad_()
    fixed = student(batch.views["weak"]).logits.log_softmax(dim=1).detach()
    divergence = (fixed.exp() * (fixed - student(moved).logits.log_softmax(dim=1))).sum(dim=1).mean()
    (gradients,) = torch.autograd.grad(divergence, moved)
    directions = torch.stack([torch.from_numpy(reference.unit(gradient)) for gradient in gradients.numpy()])
    return batch.views["weak"] + method.perturbation * directions


def take_vat(method, kind="convolutional", **changes):
    """The case, and the images that were moved by epsilon: those of the last pass."""
    batch, models = make_batch(method), KINDS[kind](method)
    expected = adversarial_images(method, models, batch)
    return take(method, batch=batch, models=models, **changes), expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes", [{}, {"perturbation": 0.5, "probe": 1e-4}, {"consistency_weight": 1.0, "ramp_share": 0.8}], ids=str
)
def test_every_term_equals_the_loop_over_images(changes, kind):
    method = VAT(**changes)
    case, _ = take_vat(method, kind, number=3)
    clean, moved = case.logits("weak"), case.passes[-1].outputs.logits.tolist()
    terms = {
        "supervised": reference.supervised(case.batch.labels.tolist(), case.logits("labeled")),
        "consistency": reference.mean_divergence([reference.softmax(row) for row in clean], moved),
        "entropy": reference.mean_entropy(clean),
    }
    consistency = reference.ramp_in_run(3, method.ramp_share * 2**20, 10) * method.consistency_weight
    weights = {"supervised": 1.0, "consistency": consistency, "entropy": method.entropy_weight}
    assert_terms(case, terms, weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"perturbation": 0.5, "probe": 1e-4}], ids=str)
def test_images_are_moved_by_epsilon_along_the_gradient_at_a_gaussian_probe(changes, kind):
    method = VAT(**changes)
    case, expected = take_vat(method, kind)
    images = case.batch.views["weak"]
    seen = [record.images.detach() for record in case.passes if record.network == "student"]
    (probe,) = [other for other in seen if other.shape == images.shape and 0 < (other - images).abs().max() < 1e-3]
    torch.testing.assert_close((probe - images) / method.probe, (probed_images(method, case.batch) - images) / method.probe)
    assert same(seen[-1], expected, tolerance=1e-5 * method.perturbation)
    lengths = (seen[-1] - images).flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, method.perturbation), rtol=1e-10, atol=0)


def test_the_direction_equals_the_gradient_by_hand_where_the_network_is_linear():
    method = VAT()
    case, _ = take_vat(method, "linear")
    layer, images = case.models.student.classifier, case.batch.views["weak"].numpy()
    probed = probed_images(method, case.batch).numpy()
    gradients = reference.linear_vat_gradients(images, probed, layer.weight.tolist(), layer.bias.tolist())
    expected = np.stack([image + 6.0 * reference.unit(gradient) for image, gradient in zip(images, gradients, strict=True)])
    assert same(case.passes[-1].images.detach(), torch.from_numpy(expected), tolerance=1e-6)


def test_the_prediction_before_the_move_is_a_fixed_target_and_the_move_a_fixed_image():
    case, _ = take_vat(VAT())
    clean, moved = case.logits("weak"), case.passes[-1].outputs.logits.tolist()
    targets = [reference.softmax(row) for row in clean]
    assert_rows(case.gradient("consistency", case.passes[-1].images), reference.cross_entropy_gradient(targets, moved))
    assert_no_gradient(case, "consistency", "weak")
    assert not case.passes[-1].images.requires_grad


def test_the_entropy_is_lowered_through_the_prediction_itself():
    case, _ = take_vat(VAT())
    assert_rows(case.gradient("entropy", "weak"), reference.entropy_gradient(case.logits("weak")))


def test_finding_the_direction_leaves_no_gradient_behind():
    case, _ = take_vat(VAT())
    assert all(parameter.grad is None for parameter in case.models.student.parameters())
    assert all(images.grad is None for images in case.batch.views.values())


def test_a_prediction_that_depends_on_nothing_gives_finite_terms_and_gradients():
    method = VAT()
    models = make_models(method)
    torch.nn.init.zeros_(models.student.classifier.weight)
    case = take(method, models=models)
    assert all(term.isfinite() for term in case.found.terms.values())
    case.found.total.backward()
    assert all(parameter.grad.isfinite().all() for parameter in models.student.parameters())


def test_in_single_precision_the_default_probe_finds_the_direction():
    """The paper's 1e-6 is below what single precision resolves: each pixel would move by less than its last digit."""
    method = VAT()
    batch, models = make_batch(method), make_models(method)
    expected = adversarial_images(method, models, batch)
    views = {name: images.float() for name, images in batch.views.items()}
    single = Models(*(network.float() for network in models))
    case = take(method, models=single, batch=Batch(batch.labels, views, batch.unlabeled))
    found, wanted = ((x.double() - batch.views["weak"]).flatten(1) for x in (case.passes[-1].images.detach(), expected))
    torch.testing.assert_close(found.norm(dim=1), torch.full((UNLABELED,), 6.0, dtype=torch.float64), rtol=1e-4, atol=0)
    assert torch.nn.functional.cosine_similarity(found, wanted).min() > 0.99
