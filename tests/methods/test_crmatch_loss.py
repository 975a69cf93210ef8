"""CR-Match's loss equals the loop over images, from one joint forward pass; without its two own terms it is FixMatch."""

from __future__ import annotations

import itertools

import pytest
import torch
from kit import (
    EXTRA,
    THRESHOLD,
    UNLABELED,
    assert_terms,
    case_of_logits,
    layers_of,
    linear_models,
    make_batch,
    make_models,
    make_network,
    take,
)
from torch import nn

from conftest import QUICK
from crmatch.augment.views import Batch
from crmatch.data.settings import parse_setting
from crmatch.methods import CRMatch, FixMatch
from crmatch.runs.cost import images_per_step
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace
from reference import crmatch_formulas as reference

METRICS = [
    {"distance": "cosine", "direction": "equivariance", "clamp": True},
    {"distance": "cosine", "direction": "equivariance", "clamp": False},
    {"distance": "cosine", "direction": "invariance"},
    {"distance": "l2", "direction": "equivariance"},
    {"distance": "l2", "direction": "invariance"},
    {"distance": "squared_l2", "direction": "invariance"},
    {"distance": "js", "direction": "equivariance"},
    {"distance": "js", "direction": "invariance"},
]
ROTATIONS = [
    *({"rotation_source": "unlabeled", "rotation_images": count} for count in (None, 3, 1, 1000)),
    *({"rotation_source": "labeled+unlabeled", "rotation_images": count} for count in (None, 3)),
    {"rotation_source": "extra", "rotation_images": EXTRA},
]
WEIGHTS = {
    "supervised_weight": 0.7,
    "unlabeled_weight": 1.3,
    "pseudo_label_weight": 0.4,
    "feature_distance_weight": 2.5,
    "rotation_weight": 0.6,
}


def name_of(choices):
    return " ".join(str(value) for value in choices.values())


def upright_views(method, batch):
    """Names and numbers of the images that are rotated."""
    if method.rotation_source == "extra":
        return {"rotation": len(batch.views["rotation"])}
    of_unlabeled = {"weak": min(method.rotation_images or UNLABELED, len(batch.views["weak"]))}
    return of_unlabeled if method.rotation_source == "unlabeled" else {"labeled": len(batch.labels)} | of_unlabeled


def turned(images, turns):
    return torch.stack([torch.from_numpy(reference.rotated(image.numpy(), turns)) for image in images])


def joint_images(method, batch):
    """The documented joint pass: the views in their order, then the images turned by 90, by 180 and by 270 degrees."""
    parts = {view.name: batch.views[view.name] for view in method.views}
    if method.rotation_weight:
        upright = torch.cat([batch.views[name][:count] for name, count in upright_views(method, batch).items()])
        parts |= {f"turned {90 * turns}": turned(upright, turns) for turns in (1, 2, 3)}
    return parts


def assert_equals_the_reference(method, seed=0):
    """The reference gets the feature maps of the recorded pass and the weights of the layers after them."""
    case = take(method, batch=make_batch(method, seed), models=make_models(method, seed))
    student, batch, (record,) = case.models.student, case.batch, case.passes
    parts = joint_images(method, batch)
    assert torch.equal(record.images, torch.cat(list(parts.values())))
    maps = record.outputs.feature_map.detach().split([len(part) for part in parts.values()])
    expected, confident = reference.crmatch_terms(
        {name: group.numpy() for name, group in zip(parts, maps, strict=True)},
        batch.labels.tolist(),
        layers_of(student.classifier),
        layers_of(student.heads["projection"]) if "projection" in student.heads else [],
        layers_of(student.heads["rotation"]) if method.rotation_weight else None,
        upright_views(method, batch) if method.rotation_weight else None,
        threshold=method.threshold,
        ties=method.ties,
        soft=method.pseudo_labels == "soft",
        pair=method.pair if method.feature_distance_weight else None,
        point=method.feature_point,
        distance=method.distance,
        direction=method.direction,
        clamp=method.clamp,
        thresholded=method.distance_uses_threshold,
    )
    assert 0 < sum(confident) < len(confident)
    assert case.found.pseudo_labels.used.tolist() == confident
    unlabeled = method.unlabeled_weight
    weights = {
        "supervised": method.supervised_weight,
        "pseudo_label": unlabeled * method.pseudo_label_weight,
        "feature_distance": unlabeled * method.feature_distance_weight,
        "rotation": method.rotation_weight,
    }
    assert_terms(case, expected, {name: weights[name] for name in expected})


MEASURES = [*itertools.product(METRICS, reference.PAIRS, "ab", ["none", "linear", "mlp"], [True, False])]


@pytest.mark.parametrize(
    ("metric", "pair", "point", "projection", "thresholded"), MEASURES[::5] if QUICK else MEASURES, ids=str
)
def test_the_loss_equals_the_loop_for_every_way_to_measure_features(metric, pair, point, projection, thresholded):
    choices = {"pair": pair, "feature_point": point, "projection": projection, "distance_uses_threshold": thresholded}
    assert_equals_the_reference(CRMatch(**metric, **choices, threshold=THRESHOLD, rotation_images=1))


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("ties", ["exclude", "include"])
@pytest.mark.parametrize("rotation", ROTATIONS, ids=name_of)
def test_the_loss_equals_the_loop_for_every_way_to_rotate_and_to_label(rotation, ties, labels):
    assert_equals_the_reference(CRMatch(**rotation, ties=ties, pseudo_labels=labels, threshold=THRESHOLD))


@pytest.mark.parametrize("projection", ["linear", "mlp"])
@pytest.mark.parametrize("width", [1, 5, 40])
def test_the_loss_equals_the_loop_for_every_width_of_the_projection(projection, width):
    assert_equals_the_reference(CRMatch(threshold=THRESHOLD, projection=projection, projection_width=width))


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("changes", [WEIGHTS, WEIGHTS | {"feature_distance_weight": 0, "rotation_weight": 0}], ids=name_of)
def test_the_loss_equals_the_loop_with_all_weights_different(changes, seed):
    assert_equals_the_reference(CRMatch(threshold=THRESHOLD, **changes), seed)


def test_detaching_the_weak_branch_does_not_change_the_value():
    assert_equals_the_reference(CRMatch(threshold=THRESHOLD, detach_weak=True))


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
def test_the_projection_has_the_layers_of_the_paper(changes, sizes):
    projection = make_network(CRMatch(**changes)).heads["projection"]
    linear = [part for part in projection.modules() if isinstance(part, nn.Linear)]
    assert [(part.in_features, part.out_features) for part in linear] == sizes
    assert all(part.bias is not None for part in linear)


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_the_unlabeled_terms_divide_by_the_whole_batch_whatever_the_mask(count):
    method = CRMatch(threshold=0.9, direction="invariance", projection="none", rotation_weight=0)
    weak = [[5.0, 0.0]] * count + [[0.5, 0.0]] * (7 - count)
    found = case_of_logits(method, [1], labeled=[[1.0, 0.0]], weak=weak, strong=[[0.0, 2.0]] * 7).found
    one_image = reference.cross_entropy(0, [0.0, 2.0])
    assert found.terms["pseudo_label"].item() == pytest.approx(count * one_image / 7, rel=1e-12, abs=0)
    assert found.terms["feature_distance"].item() == pytest.approx(count / 7, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("name", "changes", "images"),
    [
        ("paper", {}, 2304),
        ("usb", {}, 1216),
        ("paper", {"rotation_source": "labeled+unlabeled"}, 64 + 448 + 448 + 3 * (64 + 448)),
        ("paper", {"rotation_images": 64}, 64 + 448 + 448 + 3 * 64),
        ("paper", {"pair": "weak-weak"}, 64 + 3 * 448 + 3 * 448),
        ("paper", {"pair": "strong-strong", "feature_distance_weight": 0}, 64 + 448 + 448 + 3 * 448),
        ("usb", {"rotation_weight": 0}, 64 + 448 + 448),
        ("paper", {"unlabeled_weight": 0}, 64 + 448 + 3 * 448),
        ("usb", {"unlabeled_weight": 0}, 64 + 4 * 64),
        ("quick", {}, 16 + 32 + 32 + 3 * 8),
    ],
)
def test_the_joint_pass_has_the_number_of_images_of_the_paper_and_of_the_cost_estimate(name, changes, images):
    spec = recipe(parse_setting("cifar10@4"), "crmatch", name)
    spec = replace(spec, **{f"method.{key}": value for key, value in changes.items()})
    method, plan = spec.method, spec.plan
    sizes = {"labeled": plan.labeled_batch_size, "unlabeled": plan.unlabeled_batch_size, "extra": method.extra_batch_size}
    case = take(method, models=linear_models(method), **sizes)
    assert case.images_by_network() == ([images], [])
    assert images_per_step(spec) == images


def test_images_turn_counter_clockwise():
    method = CRMatch(rotation_images=1)
    batch = make_batch(method)
    batch.views["weak"][0, :, :2, :2] = torch.tensor([[1.0, 2], [3, 4]])
    images = take(method, batch=batch).passes[0].images[-3:, 0]
    corners = [images[0, -2:, :2], images[1, -2:, -2:], images[2, :2, -2:]]
    assert [corner.tolist() for corner in corners] == [[[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("ties", ["exclude", "include"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_its_two_terms_it_is_fixmatch_to_the_bit(labels, ties, dtype):
    shared = {"threshold": THRESHOLD, "ties": ties, "pseudo_labels": labels, "unlabeled_weight": 1.3}
    methods = [FixMatch(**shared), CRMatch(**shared, feature_distance_weight=0, rotation_weight=0)]
    assert methods[0].views == methods[1].views
    cases = []
    for method in methods:
        batch = make_batch(method)
        batch = Batch(batch.labels, {name: images.to(dtype) for name, images in batch.views.items()}, batch.unlabeled)
        cases.append(take(method, batch=batch, models=make_models(method)._replace(student=make_network(method).to(dtype))))
        cases[-1].found.total.backward()
    fixmatch, crmatch = (case.found for case in cases)
    assert 0 < fixmatch.pseudo_labels.used.sum() < UNLABELED
    assert torch.equal(fixmatch.total, crmatch.total)
    assert fixmatch.weights == crmatch.weights
    assert torch.equal(fixmatch.pseudo_labels.used, crmatch.pseudo_labels.used)
    first, second = (case.models.student for case in cases)
    assert first.state_dict().keys() == second.state_dict().keys()
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
