"""The gradient of each of CR-Match's terms reaches exactly the branches it should."""

from __future__ import annotations

import pytest
import torch
from kit import EXTRA, LABELED, THRESHOLD, UNLABELED, make_batch, make_models, take
from test_crmatch_loss import METRICS, name_of

from crmatch.methods import CRMatch
from reference import crmatch_formulas as reference

FIXED = {"threshold": THRESHOLD, "clamp": False}
SMOOTH = [{"clamp": False} | metric for metric in METRICS if not metric.get("clamp")]


def take_in_eval_mode(method):
    """In evaluation mode images do not interact through batch statistics, so each branch is seen alone."""
    models, batch = make_models(method), make_batch(method)
    models.student.eval()
    for images in batch.views.values():
        images.requires_grad_()
    return take(method, batch=batch, models=models)


def reached_images(method, term):
    """Whether the gradient of a term reaches an image: view -> bool per image; and which images are confident."""
    case = take_in_eval_mode(method)
    views = case.batch.views
    gradients = torch.autograd.grad(case.found.terms[term], list(views.values()))
    reached = {name: (g != 0).flatten(1).any(dim=1).tolist() for name, g in zip(views, gradients, strict=True)}
    confident = case.found.pseudo_labels.used.tolist()
    assert 0 < sum(confident) < UNLABELED
    return reached, confident


NOWHERE = {"labeled": [False] * LABELED, "weak": [False] * UNLABELED, "strong": [False] * UNLABELED}


def test_the_supervised_term_reaches_the_labeled_images_only():
    reached, _ = reached_images(CRMatch(**FIXED), "supervised")
    assert reached == NOWHERE | {"labeled": [True] * LABELED}


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_no_gradient_flows_through_the_pseudo_labels(labels):
    reached, confident = reached_images(CRMatch(**FIXED, pseudo_labels=labels), "pseudo_label")
    assert reached == NOWHERE | {"strong": confident}


@pytest.mark.parametrize("detach", [False, True], ids=["both", "detached"])
@pytest.mark.parametrize("metric", SMOOTH, ids=name_of)
@pytest.mark.parametrize("projection", ["none", "linear", "mlp"])
def test_the_feature_distance_reaches_confident_images_in_both_branches_that_are_not_detached(metric, projection, detach):
    method = CRMatch(**metric, threshold=THRESHOLD, projection=projection, detach_weak=detach)
    reached, confident = reached_images(method, "feature_distance")
    assert reached == NOWHERE | {"strong": confident} | ({} if detach else {"weak": confident})


def test_detaching_the_weak_branch_leaves_the_gradient_of_the_strong_branch_as_it_was():
    cases = [take_in_eval_mode(CRMatch(**FIXED, detach_weak=detach)) for detach in (False, True)]
    strong = [torch.autograd.grad(case.found.terms["feature_distance"], case.batch.views["strong"])[0] for case in cases]
    assert torch.equal(*strong)


def test_detaching_the_weak_branch_stops_its_share_of_the_projection_too():
    """The projection learns from the strong branch alone: d cos(z(s), w) with w held fixed."""
    case = take_in_eval_mode(CRMatch(**FIXED, detach_weak=True))
    student = case.models.student
    projection = student.heads["projection"]
    gradient = torch.autograd.grad(case.found.terms["feature_distance"], projection.weight)[0]
    weak, strong = (case.outputs(view).feature_map.flatten(1) for view in ("weak", "strong"))
    similarity = torch.nn.functional.cosine_similarity(projection(strong), projection(weak).detach())
    expected = torch.autograd.grad((similarity * case.found.pseudo_labels.used).sum() / UNLABELED, projection.weight)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-14)


def test_without_its_threshold_the_feature_distance_reaches_all_images():
    reached, _ = reached_images(CRMatch(**FIXED, distance_uses_threshold=False), "feature_distance")
    assert reached == NOWHERE | {"weak": [True] * UNLABELED, "strong": [True] * UNLABELED}


@pytest.mark.parametrize(("pair", "views"), reference.PAIRS.items())
def test_the_distance_reaches_the_two_views_of_its_pair_and_pseudo_labels_the_first_strong_view(pair, views):
    for term, expected in (("feature_distance", set(views)), ("pseudo_label", {"strong"})):
        reached, confident = reached_images(CRMatch(**FIXED, pair=pair), term)
        assert {name for name, images in reached.items() if any(images)} == expected
        assert all(reached[name] == confident for name in expected)


@pytest.mark.parametrize(
    ("rotation", "expected"),
    [
        ({}, {"weak": UNLABELED}),
        ({"rotation_images": 3}, {"weak": 3}),
        ({"rotation_source": "labeled+unlabeled"}, {"labeled": LABELED, "weak": UNLABELED}),
        ({"rotation_source": "labeled+unlabeled", "rotation_images": 2}, {"labeled": LABELED, "weak": 2}),
        ({"rotation_source": "extra", "rotation_images": EXTRA}, {"rotation": EXTRA}),
    ],
)
def test_the_rotation_term_reaches_the_rotated_images_only(rotation, expected):
    reached, _ = reached_images(CRMatch(**FIXED, **rotation), "rotation")
    for name, images in reached.items():
        count = expected.get(name, 0)
        assert images == [True] * count + [False] * (len(images) - count), name


def test_each_term_trains_the_backbone_and_its_own_layers_only():
    case = take(CRMatch(**FIXED))
    parts = {"supervised": "classifier", "pseudo_label": "classifier"}
    parts |= {"feature_distance": "heads.projection", "rotation": "heads.rotation"}
    parameters = dict(case.models.student.named_parameters())
    for term, own in parts.items():
        gradients = torch.autograd.grad(case.found.terms[term], list(parameters.values()), retain_graph=True, allow_unused=True)
        reached = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
        assert reached == {name for name in parameters if name.startswith(("backbone.", f"{own}."))}, term


@pytest.mark.parametrize("metric", METRICS, ids=name_of)
def test_without_confident_images_the_unlabeled_terms_are_exactly_zero_and_train_nothing(metric):
    case = take(CRMatch(**metric, threshold=1))
    assert not case.found.pseudo_labels.used.any()
    parameters = list(case.models.student.parameters())
    for term in ("pseudo_label", "feature_distance"):
        assert case.found.terms[term].item() == 0
        gradients = torch.autograd.grad(case.found.terms[term], parameters, retain_graph=True, allow_unused=True)
        assert all(gradient is None or (gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("metric", METRICS, ids=name_of)
def test_the_cosine_monitor_is_the_mean_over_all_pairs_whatever_the_metric(metric):
    case = take(CRMatch(**metric, threshold=THRESHOLD))
    with torch.no_grad():
        maps = [case.outputs(view).feature_map.flatten(1) for view in ("weak", "strong")]
        weak, strong = (case.models.student.head("projection", one).tolist() for one in maps)
    expected = sum(map(reference.cosine, weak, strong)) / UNLABELED
    assert case.found.monitors["cosine"].item() == pytest.approx(expected, rel=1e-10)
