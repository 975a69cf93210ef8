"""CR-Match's loss equals the loop over images, its gradient reaches the branches it should, its weights weigh.

Every network here is real but small. The reference gets the feature maps of one joint pass and the weights of the
layers after them; pooling, classifier, heads, mask and terms it computes itself, image by image.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from crmatch.augment.views import Batch
from crmatch.data.settings import parse_setting
from crmatch.methods import CRMatch, FixMatch
from crmatch.methods.base import Models, Step
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from crmatch.networks.outputs import Network, NetworkShape
from crmatch.recipes import recipe
from reference import crmatch_formulas as reference

CLASSES, CHANNELS, SIDE = 3, 2, 8
LABELED, UNLABELED, EXTRA = 4, 10, 3
THRESHOLD = 0.45
STEP = Step(0, 1, lambda stream: torch.Generator())
PAIRS = reference.PAIRS
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
EXTRA_ROTATION = {"rotation_source": "extra", "rotation_images": EXTRA}
ROTATIONS = [
    {"rotation_source": "unlabeled"},
    {"rotation_source": "unlabeled", "rotation_images": 3},
    {"rotation_source": "unlabeled", "rotation_images": 1},
    {"rotation_source": "unlabeled", "rotation_images": 1000},
    {"rotation_source": "labeled+unlabeled"},
    {"rotation_source": "labeled+unlabeled", "rotation_images": 3},
    EXTRA_ROTATION,
]
FIXED = {"threshold": THRESHOLD, "clamp": False}
WEIGHTS = {
    "supervised_weight": 0.7,
    "unlabeled_weight": 1.3,
    "pseudo_label_weight": 0.4,
    "feature_distance_weight": 2.5,
    "rotation_weight": 0.6,
}
TERMS = ("supervised", "pseudo_label", "feature_distance", "rotation")


def name_of(choices):
    return " ".join(str(value) for value in choices.values())


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than they bring on networks this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Untouched(nn.Module):
    """A teacher that no loss of this file may ask."""

    def forward(self, images):
        raise AssertionError("the teacher was asked")


def make_student(method, side=SIDE, seed=0):
    config = WideResNetConfig(filters=4, repeat=1)
    heads = method.heads
    return build_network(config, channels=CHANNELS, image_size=side, classes=CLASSES, heads=heads, seed=seed).double()


def make_batch(method, side=SIDE, labeled=LABELED, unlabeled=UNLABELED, extra=EXTRA, seed=0):
    """Each view has images of its own, the same ones whatever other views there are."""
    sizes = {"labeled": labeled, "unlabeled": unlabeled, "extra": extra}
    views = {}
    for view in method.views:
        generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, view.name)))
        shape = (sizes[view.source], CHANNELS, side, side)
        views[view.name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return Batch(torch.arange(labeled) % CLASSES, views, torch.arange(unlabeled))


def make_loss(method, student, batch):
    return method.loss(batch, Models(student, Untouched()), STEP)


def upright_views(method, batch):
    """Names and numbers of the images that are rotated, as the specification has them (3.2, row 5)."""
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


def layers_of(module):
    """Weights and biases of the linear layers of a head, for the reference."""
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return [(part.weight.detach().numpy(), part.bias.detach().numpy()) for part in linear]


def expected_terms(method, student, batch):
    """The terms, image by image, from the feature maps of one joint pass; and which images are confident."""
    parts = joint_images(method, batch)
    with torch.no_grad():
        groups = copy.deepcopy(student).backbone(torch.cat(list(parts.values()))).split([len(part) for part in parts.values()])
    return reference.crmatch_terms(
        {name: group.numpy() for name, group in zip(parts, groups, strict=True)},
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


def assert_equals_the_reference(method, side=SIDE, seed=0):
    student, batch = make_student(method, side, seed), make_batch(method, side, seed=seed)
    found = make_loss(method, student, batch)
    expected, confident = expected_terms(method, student, batch)
    assert 0 < sum(confident) < len(confident)
    assert found.pseudo_labels.used.tolist() == confident
    assert found.terms.keys() == expected.keys()
    for name, value in expected.items():
        assert found.terms[name].item() == pytest.approx(value, rel=1e-10, abs=1e-14), name
    total = reference.total_loss(
        expected["supervised"],
        expected["pseudo_label"],
        expected.get("feature_distance", 0.0),
        expected.get("rotation", 0.0),
        method.supervised_weight,
        method.unlabeled_weight,
        method.pseudo_label_weight,
        method.feature_distance_weight,
        method.rotation_weight,
    )
    assert found.total.item() == pytest.approx(total, rel=1e-10)


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
