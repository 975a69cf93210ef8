"""CR-Match's weights weigh, a weight of zero removes, and without its two terms it is FixMatch."""

from __future__ import annotations

import copy

import pytest
import torch
from crmatch_cases import EXTRA_ROTATION, FIXED, TERMS, THRESHOLD, UNLABELED, WEIGHTS, make_batch, make_loss, make_student
from torch import nn

from crmatch.augment.views import Batch
from crmatch.methods import CRMatch, FixMatch


@pytest.mark.parametrize("base", [WEIGHTS, dict.fromkeys(WEIGHTS, 1.0)], ids=["all different", "all one"])
@pytest.mark.parametrize(
    ("weight", "terms"),
    [
        ("supervised_weight", ["supervised"]),
        ("pseudo_label_weight", ["pseudo_label"]),
        ("feature_distance_weight", ["feature_distance"]),
        ("rotation_weight", ["rotation"]),
        ("unlabeled_weight", ["pseudo_label", "feature_distance"]),
    ],
)
def test_doubling_a_weight_adds_exactly_its_terms_to_the_total(base, weight, terms):
    method = CRMatch(**FIXED, **base)
    doubled = CRMatch(**FIXED, **{**base, weight: 2 * base[weight]})
    student, batch = make_student(method), make_batch(method)
    before, after = (make_loss(choice, copy.deepcopy(student), batch) for choice in (method, doubled))
    factors = {
        "supervised": base["supervised_weight"],
        "pseudo_label": base["unlabeled_weight"] * base["pseudo_label_weight"],
        "feature_distance": base["unlabeled_weight"] * base["feature_distance_weight"],
        "rotation": base["rotation_weight"],
    }
    assert list(before.terms) == list(after.terms) == list(TERMS)
    for name in TERMS:
        assert torch.equal(before.terms[name], after.terms[name])
        assert before.terms[name].item() != 0
        assert before.weights[name] == pytest.approx(factors[name], rel=1e-15)
        assert after.weights[name] == before.weights[name] * (2 if name in terms else 1)
    added = sum(factors[name] * before.terms[name].item() for name in terms)
    assert (after.total - before.total).item() == pytest.approx(added, rel=1e-12)


def test_a_weight_scales_the_gradient_as_it_scales_the_term():
    gradients = []
    for factor in (1.0, 2.0):
        method = CRMatch(**FIXED, **{name: factor for name in WEIGHTS if name != "unlabeled_weight"})
        student = make_student(method)
        make_loss(method, student, make_batch(method)).total.backward()
        gradients.append([parameter.grad for parameter in student.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(2 * one, two, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("changes", "terms", "views", "heads"),
    [
        ({}, "S P D R", "labeled weak strong", "projection rotation"),
        ({"projection": "none"}, "S P D R", "labeled weak strong", "rotation"),
        ({"pair": "weak-weak"}, "S P D R", "labeled weak strong second_weak", "projection rotation"),
        ({"pair": "strong-strong"}, "S P D R", "labeled weak strong second_strong", "projection rotation"),
        (EXTRA_ROTATION, "S P D R", "labeled weak strong rotation", "projection rotation"),
        ({"feature_distance_weight": 0}, "S P R", "labeled weak strong", "rotation"),
        ({"feature_distance_weight": 0, "pair": "weak-weak"}, "S P R", "labeled weak strong", "rotation"),
        ({"feature_distance_weight": 0, "pair": "strong-strong"}, "S P R", "labeled weak strong", "rotation"),
        ({"rotation_weight": 0}, "S P D", "labeled weak strong", "projection"),
        ({"rotation_weight": 0} | EXTRA_ROTATION, "S P D", "labeled weak strong", "projection"),
        ({"feature_distance_weight": 0, "rotation_weight": 0}, "S P", "labeled weak strong", ""),
        ({"pseudo_label_weight": 0}, "S D R", "labeled weak strong", "projection rotation"),
        ({"pseudo_label_weight": 0, "pair": "weak-weak"}, "S D R", "labeled weak second_weak", "projection rotation"),
        ({"unlabeled_weight": 0}, "S R", "labeled weak", "rotation"),
        ({"unlabeled_weight": 0, "pair": "strong-strong"}, "S R", "labeled weak", "rotation"),
        ({"unlabeled_weight": 0} | EXTRA_ROTATION, "S R", "labeled rotation", "rotation"),
        ({"unlabeled_weight": 0, "rotation_weight": 0}, "S", "labeled", ""),
        ({"supervised_weight": 0}, "P D R", "weak strong", "projection rotation"),
        (
            {"supervised_weight": 0, "rotation_source": "labeled+unlabeled"},
            "P D R",
            "labeled weak strong",
            "projection rotation",
        ),
        ({"supervised_weight": 0, "unlabeled_weight": 0}, "R", "weak", "rotation"),
        ({"supervised_weight": 0, "feature_distance_weight": 0, "rotation_weight": 0}, "P", "weak strong", ""),
    ],
)
def test_a_weight_of_zero_removes_term_view_and_head(changes, terms, views, heads):
    method = CRMatch(**changes)
    assert [view.name for view in method.views] == views.split()
    student = make_student(method)
    assert list(student.heads) == heads.split()
    found = make_loss(method, student, make_batch(method))
    assert list(found.terms) == list(found.weights)
    assert list(found.terms) == [term for term, letter in zip(TERMS, "SPDR", strict=True) if letter in terms]


def test_a_view_that_no_term_needs_is_not_asked_for():
    """Without pseudo-labels and without a threshold nothing looks at the weak view of a strong pair."""
    method = CRMatch(pair="strong-strong", distance_uses_threshold=False, pseudo_label_weight=0, rotation_weight=0)
    assert [view.name for view in method.views] == ["labeled", "strong", "second_strong"]


def test_only_an_independent_draw_for_rotation_needs_extra_images():
    assert CRMatch().extra_batch_size == 0
    assert CRMatch(rotation_images=16).extra_batch_size == 0
    assert CRMatch(rotation_source="extra", rotation_images=64).extra_batch_size == 64
    assert CRMatch(rotation_source="extra", rotation_images=64, rotation_weight=0).extra_batch_size == 0


def test_views_come_from_the_sources_and_augmentations_of_the_paper():
    views = {}
    for changes in ({"pair": "weak-weak"}, {"pair": "strong-strong"}, EXTRA_ROTATION):
        views |= {view.name: (view.source, view.augmentation) for view in CRMatch(**changes).views}
    assert views == {
        "labeled": ("labeled", "weak"),
        "weak": ("unlabeled", "weak"),
        "strong": ("unlabeled", "strong"),
        "second_weak": ("unlabeled", "weak"),
        "second_strong": ("unlabeled", "strong"),
        "rotation": ("extra", "weak"),
    }


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, [(64, 16)]),
        ({"feature_point": "b"}, [(16, 16)]),
        ({"projection": "mlp"}, [(64, 16), (16, 16)]),
        ({"projection": "mlp", "feature_point": "b"}, [(16, 16), (16, 16)]),
        ({"projection_width": 5}, [(64, 5)]),
    ],
)
def test_the_projection_has_the_layers_of_the_specification(changes, sizes):
    projection = make_student(CRMatch(**changes)).heads["projection"]
    linear = [part for part in projection.modules() if isinstance(part, nn.Linear)]
    assert [(part.in_features, part.out_features) for part in linear] == sizes
    assert all(part.bias is not None for part in linear)


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("ties", ["exclude", "include"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_its_two_terms_it_is_fixmatch_to_the_bit(labels, ties, dtype):
    shared = {"threshold": THRESHOLD, "ties": ties, "pseudo_labels": labels, "unlabeled_weight": 1.3}
    methods = [FixMatch(**shared), CRMatch(**shared, feature_distance_weight=0, rotation_weight=0)]
    assert methods[0].views == methods[1].views
    results = []
    for method in methods:
        student = make_student(method).to(dtype)
        batch = make_batch(method)
        batch = Batch(batch.labels, {name: images.to(dtype) for name, images in batch.views.items()}, batch.unlabeled)
        found = make_loss(method, student, batch)
        assert 0 < found.pseudo_labels.used.sum() < UNLABELED
        found.total.backward()
        results.append((found, student))
    (fixmatch, first), (crmatch, second) = results
    assert torch.equal(fixmatch.total, crmatch.total)
    assert fixmatch.weights == crmatch.weights
    assert torch.equal(fixmatch.pseudo_labels.used, crmatch.pseudo_labels.used)
    assert first.state_dict().keys() == second.state_dict().keys()
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_the_two_extra_terms_move_no_shared_weight_at_the_start():
    full, fixmatch = make_student(CRMatch()).state_dict(), make_student(FixMatch()).state_dict()
    assert fixmatch.keys() < full.keys()
    assert all(torch.equal(full[name], tensor) for name, tensor in fixmatch.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distance": "squared_l2"}, "distance squared_l2 has no lower bound and cannot be pushed; use direction invariance"),
        ({"detach_weak": True, "pair": "weak-weak"}, "detach_weak needs pair weak-strong, found weak-weak"),
        ({"detach_weak": True, "pair": "strong-strong"}, "detach_weak needs pair weak-strong, found strong-strong"),
        ({"rotation_source": "extra"}, "rotation_source extra needs rotation_images, for example 64"),
    ],
)
def test_choices_that_cannot_be_meant_together_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        CRMatch(**values)
