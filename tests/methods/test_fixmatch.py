"""FixMatch's loss equals the loop over images. That CR-Match contains it to the bit is shown in `test_crmatch`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from crmatch.augment.views import Batch, View
from crmatch.methods import FixMatch
from crmatch.methods.base import Models, Step
from crmatch.methods.confidence import above
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from reference import crmatch_formulas as reference

LABELED, UNLABELED, CLASSES = 4, 12, 3
THRESHOLD = 0.45
STEP = Step(0, 1, lambda stream: torch.Generator())


class Untouched(nn.Module):
    """A teacher that no loss of this file may ask."""

    def forward(self, images):
        raise AssertionError("the teacher was asked")


def make_student():
    return build_network(WideResNetConfig(filters=4, repeat=1), channels=2, image_size=8, classes=CLASSES).double()


def make_batch(method):
    generator = torch.Generator().manual_seed(3)
    sizes = {"labeled": LABELED, "unlabeled": UNLABELED}
    views = {v.name: torch.randn(sizes[v.source], 2, 8, 8, generator=generator, dtype=torch.float64) for v in method.views}
    return Batch(torch.arange(LABELED) % CLASSES, views, torch.arange(UNLABELED))


def make_loss(method, student, batch):
    return method.loss(batch, Models(student, Untouched()), STEP)


def expected_terms(method, student, batch):
    with torch.no_grad():
        maps = copy.deepcopy(student).backbone(torch.cat([batch.views[view.name] for view in method.views]))
    groups = dict(zip(("labeled", "weak", "strong"), maps.split([LABELED, UNLABELED, UNLABELED]), strict=True))
    classifier = [(student.classifier.weight.detach().numpy(), student.classifier.bias.detach().numpy())]
    soft = method.pseudo_labels == "soft"
    maps = {name: group.numpy() for name, group in groups.items()}
    labels = batch.labels.tolist()
    return reference.crmatch_terms(maps, labels, classifier, threshold=method.threshold, ties=method.ties, soft=soft)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 2.0, 0.3)])
@pytest.mark.parametrize("ties", ["exclude", "include"])
@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_the_loss_equals_the_loop_over_images(labels, ties, weights):
    supervised, unlabeled, pseudo_label = weights
    method = FixMatch(
        threshold=THRESHOLD,
        pseudo_labels=labels,
        ties=ties,
        supervised_weight=supervised,
        unlabeled_weight=unlabeled,
        pseudo_label_weight=pseudo_label,
    )
    student, batch = make_student(), make_batch(method)
    found = make_loss(method, student, batch)
    expected, confident = expected_terms(method, student, batch)
    assert 0 < sum(confident) < UNLABELED
    assert found.pseudo_labels.used.tolist() == confident
    assert found.terms.keys() == expected.keys()
    for name, value in expected.items():
        assert found.terms[name].item() == pytest.approx(value, rel=1e-10), name
    total = supervised * expected["supervised"] + unlabeled * pseudo_label * expected["pseudo_label"]
    assert found.total.item() == pytest.approx(total, rel=1e-10)


def test_soft_and_hard_pseudo_labels_differ():
    values = []
    for labels in ("hard", "soft"):
        method = FixMatch(threshold=THRESHOLD, pseudo_labels=labels)
        values.append(make_loss(method, make_student(), make_batch(method)).terms["pseudo_label"].item())
    assert values[0] != values[1]


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_unconfident_images_and_pseudo_labels_give_no_gradient(labels):
    """In evaluation mode images do not meet in batch statistics, so each one is seen alone."""
    method = FixMatch(threshold=THRESHOLD, pseudo_labels=labels)
    student, batch = make_student().eval(), make_batch(method)
    views = {name: images.requires_grad_() for name, images in batch.views.items()}
    found = make_loss(method, student, batch)
    confident = found.pseudo_labels.used.tolist()
    assert 0 < sum(confident) < UNLABELED
    gradients = torch.autograd.grad(found.terms["pseudo_label"], list(views.values()))
    reached = {name: (g != 0).flatten(1).any(dim=1).tolist() for name, g in zip(views, gradients, strict=True)}
    assert reached == {"labeled": [False] * LABELED, "weak": [False] * UNLABELED, "strong": confident}


def test_without_confident_images_the_gradient_is_that_of_the_supervised_term():
    method = FixMatch(threshold=1)
    student, batch = make_student(), make_batch(method)
    found = make_loss(method, student, batch)
    assert found.terms["pseudo_label"].item() == 0
    parameters = list(student.parameters())
    total = torch.autograd.grad(found.total, parameters, retain_graph=True)
    supervised = torch.autograd.grad(found.terms["supervised"], parameters)
    for one, other in zip(total, supervised, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize(
    ("weight", "term"),
    [("supervised_weight", "supervised"), ("pseudo_label_weight", "pseudo_label"), ("unlabeled_weight", "pseudo_label")],
)
def test_doubling_a_weight_adds_exactly_its_term_to_the_total(weight, term):
    before_method, after_method = FixMatch(threshold=THRESHOLD), FixMatch(threshold=THRESHOLD, **{weight: 2.0})
    batch = make_batch(before_method)
    before, after = (make_loss(method, make_student(), batch) for method in (before_method, after_method))
    assert all(torch.equal(before.terms[name], after.terms[name]) for name in before.terms)
    assert before.terms[term].item() != 0
    assert (after.total - before.total).item() == pytest.approx(before.terms[term].item(), rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "terms", "views"),
    [
        ({}, ["supervised", "pseudo_label"], ["labeled", "weak", "strong"]),
        ({"pseudo_label_weight": 0}, ["supervised"], ["labeled"]),
        ({"unlabeled_weight": 0}, ["supervised"], ["labeled"]),
        ({"supervised_weight": 0}, ["pseudo_label"], ["weak", "strong"]),
    ],
)
def test_a_weight_of_zero_removes_term_and_views(changes, terms, views):
    method = FixMatch(**changes)
    assert [view.name for view in method.views] == views
    found = make_loss(method, make_student(), make_batch(method))
    assert list(found.terms) == list(found.weights) == terms


def test_one_pass_sees_labeled_weak_and_strong_images_in_this_order():
    method = FixMatch()
    assert method.views == (
        View("labeled", "labeled", "weak"),
        View("weak", "unlabeled", "weak"),
        View("strong", "unlabeled", "strong"),
    )
    student, batch = make_student(), make_batch(method)
    seen = []
    student.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    make_loss(method, student, batch)
    (images,) = seen
    assert torch.equal(images, torch.cat([batch.views[name] for name in ("labeled", "weak", "strong")]))


@pytest.mark.parametrize(("ties", "expected"), [("exclude", [False, False, True]), ("include", [False, True, True])])
def test_the_mask_treats_a_confidence_equal_to_the_threshold_as_asked(ties, expected):
    confidence = torch.tensor([0.5, 0.75, 0.875])
    assert above(confidence, 0.75, ties).tolist() == expected
