"""CR-Match's loss equals the loop over images, from one joint pass."""

from __future__ import annotations

import pytest
import torch
from crmatch_cases import (
    CHANNELS,
    CLASSES,
    FIXED,
    LABELED,
    METRICS,
    PAIRS,
    ROTATIONS,
    TERMS,
    THRESHOLD,
    UNLABELED,
    WEIGHTS,
    assert_equals_the_reference,
    joint_images,
    make_batch,
    make_loss,
    make_student,
    name_of,
)
from torch import nn

from crmatch.augment.views import Batch
from crmatch.data.settings import parse_setting
from crmatch.methods import CRMatch
from crmatch.networks.network import Network, NetworkShape
from crmatch.spec.recipes import recipe
from reference import crmatch_formulas as reference


@pytest.mark.parametrize("thresholded", [True, False], ids=["confident", "all"])
@pytest.mark.parametrize("projection", ["none", "linear", "mlp"])
@pytest.mark.parametrize("point", ["a", "b"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("metric", METRICS, ids=name_of)
def test_the_loss_equals_the_loop_for_every_way_to_measure_features(metric, pair, point, projection, thresholded):
    assert_equals_the_reference(
        CRMatch(
            **metric,
            pair=pair,
            feature_point=point,
            projection=projection,
            distance_uses_threshold=thresholded,
            threshold=THRESHOLD,
            rotation_images=1,
        )
    )


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("ties", ["exclude", "include"])
@pytest.mark.parametrize("rotation", ROTATIONS, ids=name_of)
def test_the_loss_equals_the_loop_for_every_way_to_rotate_and_to_label(rotation, ties, labels):
    assert_equals_the_reference(CRMatch(**rotation, ties=ties, pseudo_labels=labels, threshold=THRESHOLD))


@pytest.mark.parametrize("projection", ["linear", "mlp"])
@pytest.mark.parametrize("width", [1, 5, 40])
def test_the_loss_equals_the_loop_for_every_width_of_the_projection(projection, width):
    method = CRMatch(**FIXED, projection=projection, projection_width=width)
    assert make_student(method).head("projection", torch.zeros(1, 64, dtype=torch.float64)).shape == (1, width)
    assert_equals_the_reference(method)


@pytest.mark.parametrize(("seed", "threshold"), [(0, 0.45), (1, 0.5), (2, 0.6), (3, 0.55), (4, 0.45)])
def test_the_loss_equals_the_loop_with_all_weights_different(seed, threshold):
    assert_equals_the_reference(CRMatch(threshold=threshold, **WEIGHTS), side=16, seed=seed)


def test_detaching_the_weak_branch_does_not_change_the_value():
    assert_equals_the_reference(CRMatch(threshold=THRESHOLD, detach_weak=True))


def test_the_order_of_the_unlabeled_images_does_not_matter():
    method = CRMatch(**FIXED)
    student, batch = make_student(method), make_batch(method)
    order = torch.randperm(UNLABELED, generator=torch.Generator().manual_seed(1))
    views = {name: images if name == "labeled" else images[order] for name, images in batch.views.items()}
    found = make_loss(method, student, batch)
    shuffled = make_loss(method, student, Batch(batch.labels, views, batch.unlabeled[order]))
    for term in TERMS:
        torch.testing.assert_close(found.terms[term], shuffled.terms[term], rtol=1e-12, atol=0)


def transparent_student(method, side=2, classes=2):
    """A network whose outputs are seen at a glance: the feature map is the image, logits are the means of its channels."""
    classifier = nn.Linear(CHANNELS, classes)
    nn.init.eye_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return Network(nn.Identity(), classifier, method.heads(NetworkShape((CHANNELS, side, side), classes))).double()


def images_of_logits(rows, side=2):
    """Constant images whose logits are `rows`."""
    return torch.tensor(rows, dtype=torch.float64)[:, :, None, None].expand(-1, -1, side, side).clone()


@pytest.mark.parametrize(("ties", "used"), [("exclude", [False, True, False, True]), ("include", [True, True, True, True])])
@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_a_confidence_equal_to_the_threshold_counts_only_where_ties_are_included(ties, used, labels):
    weak = [[0.0, 0.0], [2.0, 0.0], [-7.0, -7.0], [0.0, 1.0]]
    strong = [[1.0, 0.0], [0.5, 0.2], [0.3, 1.0], [0.6, 0.1]]
    method = CRMatch(threshold=0.5, ties=ties, pseudo_labels=labels, projection="none", rotation_weight=0, clamp=False)
    views = {
        "labeled": images_of_logits([[1.0, 0.0]]),
        "weak": images_of_logits(weak),
        "strong": images_of_logits(strong),
    }
    found = make_loss(method, transparent_student(method), Batch(torch.tensor([1]), views, torch.arange(4)))
    assert found.pseudo_labels.used.tolist() == used
    expected = reference.pseudo_label_loss(weak, strong, 0.5, ties, soft=labels == "soft")
    assert found.terms["pseudo_label"].item() == pytest.approx(expected, rel=1e-12)
    flat = [[[value for value in row for _ in range(4)] for row in rows] for rows in (strong, weak)]
    expected = reference.feature_distance_loss(*flat, weak, 0.5, clamp=False, ties=ties)
    assert found.terms["feature_distance"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("ties", "used"), [("exclude", [False, False]), ("include", [True, False])])
def test_a_certain_prediction_reaches_a_threshold_of_1_only_where_ties_are_included(ties, used):
    method = CRMatch(threshold=1, ties=ties, feature_distance_weight=0, rotation_weight=0)
    weak, strong = [[1000.0, 0.0], [3.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]
    views = {name: images_of_logits(rows) for name, rows in {"labeled": [[1.0, 0.0]], "weak": weak, "strong": strong}.items()}
    found = make_loss(method, transparent_student(method), Batch(torch.tensor([1]), views, torch.arange(2)))
    assert found.pseudo_labels.used.tolist() == used
    expected = reference.pseudo_label_loss(weak, strong, 1.0, ties)
    assert found.terms["pseudo_label"].item() == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_the_unlabeled_terms_divide_by_the_whole_batch_whatever_the_mask(count):
    method = CRMatch(threshold=0.9, direction="invariance", projection="none", rotation_weight=0)
    weak = [[5.0, 0.0]] * count + [[0.5, 0.0]] * (7 - count)
    views = {
        "labeled": images_of_logits([[1.0, 0.0]]),
        "weak": images_of_logits(weak),
        "strong": images_of_logits([[0.0, 2.0]] * 7),
    }
    found = make_loss(method, transparent_student(method), Batch(torch.tensor([1]), views, torch.arange(7)))
    one_image = reference.cross_entropy(0, [0.0, 2.0])
    assert found.terms["pseudo_label"].item() == pytest.approx(count * one_image / 7, rel=1e-12, abs=0)
    assert found.terms["feature_distance"].item() == pytest.approx(count / 7, rel=1e-12, abs=0)


def test_features_beyond_90_degrees_are_not_pushed_further():
    method = CRMatch(threshold=0.4, projection="none", rotation_weight=0)
    views = {
        "labeled": images_of_logits([[1.0, 0.0]]),
        "weak": images_of_logits([[5.0, 0.0], [5.0, 1.0]]),
        "strong": images_of_logits([[-1.0, 2.0], [-1.0, 0.5]]).requires_grad_(),
    }
    found = make_loss(method, transparent_student(method), Batch(torch.tensor([1]), views, torch.arange(2)))
    assert found.terms["feature_distance"].item() == 0
    (gradient,) = torch.autograd.grad(found.terms["feature_distance"], views["strong"])
    assert (gradient == 0).all()
    assert found.monitors["cosine"].item() < 0


def watch(student):
    """Every batch of images that goes through the student from now on."""
    seen = []
    student.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    return seen


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rotation", [*ROTATIONS, {"rotation_weight": 0}], ids=name_of)
def test_one_pass_sees_the_views_then_the_images_turned_by_90_180_and_270_degrees(rotation, pair):
    method = CRMatch(**rotation, pair=pair)
    student, batch = make_student(method), make_batch(method)
    seen = watch(student)
    make_loss(method, student, batch)
    (images,) = seen
    assert torch.equal(images, torch.cat(list(joint_images(method, batch).values())))


@pytest.mark.parametrize(
    ("name", "changes", "images"),
    [
        ("paper", {}, 2304),
        ("usb", {}, 1216),
        ("paper", {"rotation_source": "labeled+unlabeled"}, 64 + 448 + 448 + 3 * (64 + 448)),
        ("paper", {"rotation_images": 64}, 64 + 448 + 448 + 3 * 64),
        ("paper", {"pair": "weak-weak"}, 64 + 3 * 448 + 3 * 448),
        ("paper", {"pair": "strong-strong"}, 64 + 3 * 448 + 3 * 448),
        ("paper", {"pair": "strong-strong", "feature_distance_weight": 0}, 64 + 448 + 448 + 3 * 448),
        ("paper", {"rotation_weight": 0}, 64 + 448 + 448),
        ("usb", {"rotation_weight": 0}, 64 + 448 + 448),
        ("paper", {"feature_distance_weight": 0, "rotation_weight": 0}, 64 + 448 + 448),
        ("paper", {"unlabeled_weight": 0}, 64 + 448 + 3 * 448),
        ("paper", {"unlabeled_weight": 0, "rotation_images": 64}, 64 + 64 + 3 * 64),
        ("usb", {"unlabeled_weight": 0}, 64 + 4 * 64),
        ("paper", {"unlabeled_weight": 0, "rotation_weight": 0}, 64),
        ("paper", {"supervised_weight": 0}, 448 + 448 + 3 * 448),
        ("paper", {"supervised_weight": 0, "unlabeled_weight": 0}, 448 + 3 * 448),
        ("quick", {}, 16 + 112 + 112 + 3 * 16),
    ],
)
def test_the_joint_pass_has_the_number_of_images_of_the_specification(name, changes, images):
    spec = recipe(parse_setting("cifar10@4"), "crmatch", name)
    method = type(spec.method)(**{**spec.method.model_dump(), **changes})
    sizes = {"labeled": spec.plan.labeled_batch_size, "unlabeled": spec.plan.unlabeled_batch_size}
    student = transparent_student(method, classes=CLASSES)
    seen = watch(student)
    make_loss(method, student, make_batch(method, side=2, extra=method.extra_batch_size, **sizes))
    assert [len(group) for group in seen] == [images]


def test_images_turn_counter_clockwise():
    method = CRMatch(rotation_images=1, feature_distance_weight=0)
    batch = make_batch(method, side=2)
    batch.views["weak"][0] = torch.tensor([[1.0, 2], [3, 4]])
    student = transparent_student(method, classes=CLASSES)
    seen = watch(student)
    make_loss(method, student, batch)
    assert [image[0].tolist() for image in seen[0][-3:]] == [[[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]


def test_the_unrotated_copies_are_the_views_and_are_not_computed_twice():
    method = CRMatch(**FIXED)
    student, batch = make_student(method), make_batch(method)
    seen = watch(student)
    make_loss(method, student, batch)
    (images,) = seen
    assert len(images) == len(images.unique(dim=0)) == LABELED + 2 * UNLABELED + 3 * UNLABELED
