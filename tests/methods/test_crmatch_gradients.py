"""The gradient of each of CR-Match's terms reaches exactly the branches it should."""

from __future__ import annotations

import pytest
import torch
from crmatch_cases import (
    EXTRA,
    EXTRA_ROTATION,
    FIXED,
    LABELED,
    METRICS,
    PAIRS,
    THRESHOLD,
    UNLABELED,
    make_batch,
    make_loss,
    make_student,
    name_of,
)

from crmatch.methods import CRMatch
from reference import crmatch_formulas as reference


def image_gradients(method, term):
    """Whether the gradient of a term reaches an image: view -> bool per image; and which images are confident.

    In evaluation mode images do not meet in batch statistics, so each branch is seen alone.
    """
    student, batch = make_student(method).eval(), make_batch(method)
    views = {name: images.requires_grad_() for name, images in batch.views.items()}
    found = make_loss(method, student, batch)
    gradients = torch.autograd.grad(found.terms[term], list(views.values()))
    reached = {name: (g != 0).flatten(1).any(dim=1).tolist() for name, g in zip(views, gradients, strict=True)}
    confident = found.pseudo_labels.used.tolist()
    assert 0 < sum(confident) < UNLABELED
    return reached, confident


NOWHERE = {"labeled": [False] * LABELED, "weak": [False] * UNLABELED, "strong": [False] * UNLABELED}


def test_the_supervised_term_reaches_the_labeled_images_only():
    reached, _ = image_gradients(CRMatch(**FIXED), "supervised")
    assert reached == NOWHERE | {"labeled": [True] * LABELED}


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_no_gradient_flows_through_the_pseudo_labels(labels):
    reached, confident = image_gradients(CRMatch(**FIXED, pseudo_labels=labels), "pseudo_label")
    assert reached == NOWHERE | {"strong": confident}


@pytest.mark.parametrize("metric", [metric for metric in METRICS if not metric.get("clamp")], ids=name_of)
@pytest.mark.parametrize("projection", ["none", "linear", "mlp"])
def test_the_feature_distance_reaches_both_branches_of_confident_images(metric, projection):
    method = CRMatch(**{"clamp": False} | metric, threshold=THRESHOLD, projection=projection)
    reached, confident = image_gradients(method, "feature_distance")
    assert reached == NOWHERE | {"weak": confident, "strong": confident}


@pytest.mark.parametrize("metric", [metric for metric in METRICS if not metric.get("clamp")], ids=name_of)
@pytest.mark.parametrize("projection", ["none", "linear", "mlp"])
def test_detaching_the_weak_branch_stops_its_gradient_only(metric, projection):
    method = CRMatch(**{"clamp": False} | metric, threshold=THRESHOLD, projection=projection, detach_weak=True)
    reached, confident = image_gradients(method, "feature_distance")
    assert reached == NOWHERE | {"strong": confident}


def test_detaching_the_weak_branch_leaves_the_gradient_of_the_strong_branch_as_it_was():
    gradients = []
    for detach in (False, True):
        method = CRMatch(**FIXED, detach_weak=detach)
        student, batch = make_student(method).eval(), make_batch(method)
        strong = batch.views["strong"].requires_grad_()
        gradients += torch.autograd.grad(make_loss(method, student, batch).terms["feature_distance"], strong)
    assert torch.equal(*gradients)


def test_detaching_the_weak_branch_stops_its_share_of_the_projection_too():
    """The projection learns from the strong branch alone: d cos(z(s), w) with w held fixed."""
    method = CRMatch(**FIXED, detach_weak=True)
    student, batch = make_student(method).eval(), make_batch(method)
    found = make_loss(method, student, batch)
    projection = student.heads["projection"]
    gradient = torch.autograd.grad(found.terms["feature_distance"], projection.weight)[0]
    with torch.no_grad():
        maps = {name: student(batch.views[name]).feature_map.flatten(1) for name in ("weak", "strong")}
        weak = projection(maps["weak"])
    similarity = torch.nn.functional.cosine_similarity(projection(maps["strong"]), weak)
    expected = torch.autograd.grad((similarity * found.pseudo_labels.used).sum() / UNLABELED, projection.weight)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-14)


def test_without_its_threshold_the_feature_distance_reaches_all_images():
    reached, _ = image_gradients(CRMatch(**FIXED, distance_uses_threshold=False), "feature_distance")
    assert reached == NOWHERE | {"weak": [True] * UNLABELED, "strong": [True] * UNLABELED}


@pytest.mark.parametrize(("pair", "views"), PAIRS.items())
def test_each_pair_sends_the_gradient_of_the_distance_into_its_two_views(pair, views):
    reached, confident = image_gradients(CRMatch(**FIXED, pair=pair), "feature_distance")
    assert {name for name, images in reached.items() if any(images)} == set(views)
    assert all(reached[name] == confident for name in views)


@pytest.mark.parametrize("pair", ["weak-weak", "strong-strong"])
def test_pseudo_labels_go_from_the_first_weak_to_the_first_strong_view_for_every_pair(pair):
    reached, confident = image_gradients(CRMatch(**FIXED, pair=pair), "pseudo_label")
    assert {name for name, images in reached.items() if any(images)} == {"strong"}
    assert reached["strong"] == confident


@pytest.mark.parametrize(
    ("rotation", "expected"),
    [
        ({}, {"weak": UNLABELED}),
        ({"rotation_images": 3}, {"weak": 3}),
        ({"rotation_source": "labeled+unlabeled"}, {"labeled": LABELED, "weak": UNLABELED}),
        ({"rotation_source": "labeled+unlabeled", "rotation_images": 2}, {"labeled": LABELED, "weak": 2}),
        (EXTRA_ROTATION, {"rotation": EXTRA}),
    ],
)
def test_the_rotation_term_reaches_the_rotated_images_only(rotation, expected):
    reached, _ = image_gradients(CRMatch(**FIXED, **rotation), "rotation")
    for name, images in reached.items():
        count = expected.get(name, 0)
        assert images == [True] * count + [False] * (len(images) - count), name


def test_each_term_trains_the_backbone_and_its_own_layers_only():
    method = CRMatch(**FIXED)
    student, batch = make_student(method), make_batch(method)
    found = make_loss(method, student, batch)
    parts = {"supervised": "classifier", "pseudo_label": "classifier"}
    parts |= {"feature_distance": "heads.projection", "rotation": "heads.rotation"}
    names = [name for name, _ in student.named_parameters()]
    for term, own in parts.items():
        gradients = torch.autograd.grad(found.terms[term], list(student.parameters()), retain_graph=True, allow_unused=True)
        reached = {name for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
        assert reached == {name for name in names if name.startswith(("backbone.", f"{own}."))}, term


@pytest.mark.parametrize("metric", METRICS, ids=name_of)
def test_without_confident_images_the_unlabeled_terms_are_exactly_zero_and_train_nothing(metric):
    method = CRMatch(**metric, threshold=1)
    student, batch = make_student(method), make_batch(method)
    found = make_loss(method, student, batch)
    assert not found.pseudo_labels.used.any()
    for term in ("pseudo_label", "feature_distance"):
        assert found.terms[term].item() == 0
        parameters = list(student.parameters())
        gradients = torch.autograd.grad(found.terms[term], parameters, retain_graph=True, allow_unused=True)
        assert all(gradient is None or (gradient == 0).all() for gradient in gradients)
    found.total.backward()
    assert all((parameter.grad == 0).all() for parameter in student.heads["projection"].parameters())
    assert all((parameter.grad != 0).any() for parameter in student.heads["rotation"].parameters())


def test_monitors_and_pseudo_labels_carry_no_gradient():
    method = CRMatch(**FIXED)
    found = make_loss(method, make_student(method), make_batch(method))
    assert not any(value.requires_grad for value in found.monitors.values())
    assert not found.pseudo_labels.labels.requires_grad
    assert not found.pseudo_labels.used.requires_grad


def test_the_cosine_monitor_is_the_mean_over_all_pairs_whatever_the_metric():
    for metric in METRICS:
        method = CRMatch(**metric, threshold=THRESHOLD, rotation_weight=0)
        student, batch = make_student(method).eval(), make_batch(method)
        with torch.no_grad():
            weak, strong = (
                student.head("projection", student(batch.views[name]).feature_map.flatten(1)).tolist()
                for name in ("weak", "strong")
            )
        expected = sum(map(reference.cosine, weak, strong)) / UNLABELED
        assert make_loss(method, student, batch).monitors["cosine"].item() == pytest.approx(expected, rel=1e-10)
