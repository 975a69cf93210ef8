"""A weight scales its term, and a weight of 0 removes the term with its views, heads and images; weights ramp up."""

from __future__ import annotations

import math

import pytest
import torch
from kit import EXTRA, LABELED, UNLABELED, make, make_models, make_network, take

from crmatch.methods import METHODS, build_method, method_class
from reference import baseline_formulas as reference

WEIGHTS = [(name, field) for name in METHODS for field in method_class(name).model_fields if field.endswith("_weight")]


@pytest.mark.parametrize(("name", "field"), WEIGHTS)
def test_doubling_a_weight_adds_exactly_its_terms_to_the_total(name, field):
    method = make(name, {"mask": "free"} if field == "fairness_weight" else {})
    doubled = type(method)(**{**method.model_dump(), field: 2 * getattr(method, field)})
    before, after = (take(chosen, models=make_models(method)).found for chosen in (method, doubled))
    assert all(torch.equal(before.terms[term], after.terms[term]) for term in before.terms)
    terms = ("pseudo_label", "feature_distance") if field == "unlabeled_weight" else (field.removesuffix("_weight"),)
    added = sum(before.weights[term] * before.terms[term].item() for term in terms if term in before.terms)
    assert added != 0
    assert (after.total - before.total).item() == pytest.approx(added, rel=1e-8)


def off(*terms):
    return {f"{term}_weight": 0 for term in terms}


B, U = LABELED, UNLABELED
STRONG, MIXMATCH_VIEWS, PLAIN_VIEWS = "labeled weak strong", "labeled weak second_weak", "labeled weak plain_labeled plain"
REMIXMATCH, REMIXMATCH_VIEWS = "supervised mixed strong rotation", "labeled weak strong strong_2"
FEATMATCH_LABELED = "labeled labeled_strong_1 labeled_strong_2"
FEATMATCH_VIEWS, FEATMATCH_PASSES = f"{FEATMATCH_LABELED} weak strong_1 strong_2", [B + U, 3 * (B + U)]
S, P, D, R = "supervised ", "pseudo_label ", "feature_distance ", "rotation"
Z_H, R_A = "projection rotation", "rotation alignment"
EXTRA_IMAGES = {"rotation_source": "extra", "rotation_images": EXTRA}
# method, changes, terms, views, heads, images in each forward pass of the student (and of the teacher)
CASES = [
    ("supervised", {}, "supervised", "labeled", "", [B]),
    ("pseudo_label", {}, "supervised pseudo_label", "labeled weak", "", [B, U]),
    ("pseudo_label", off("pseudo_label"), "supervised", "labeled", "", [B]),
    ("pi_model", {}, "supervised consistency", "labeled weak second_weak", "", [B, U, U]),
    ("pi_model", off("consistency"), "supervised", "labeled", "", [B]),
    ("mean_teacher", {}, "supervised logit_distance consistency", "labeled weak second_weak", "consistency", [B, U], [U]),
    ("mean_teacher", off("logit_distance"), "supervised consistency", "labeled weak second_weak", "", [B, U], [U]),
    ("mean_teacher", off("consistency"), "supervised", "labeled", "", [B]),
    ("mean_teacher", off("consistency") | {"joint_batch": True}, "supervised", "labeled", "", [B]),
    ("ict", {}, "supervised consistency", "labeled weak", "", [B, U], [U]),
    ("ict", off("consistency"), "supervised", "labeled", "", [B]),
    ("vat", {}, "supervised consistency entropy", "labeled weak", "", [B, U, U, U]),
    ("vat", off("entropy"), "supervised consistency", "labeled weak", "", [B, U, U, U]),
    ("vat", off("consistency"), "supervised entropy", "labeled weak", "", [B, U]),
    ("vat", off("consistency", "entropy"), "supervised", "labeled", "", [B]),
    ("uda", {}, "supervised consistency entropy", STRONG, "", [B + 2 * U]),
    ("uda", off("entropy"), "supervised consistency", STRONG, "", [B + 2 * U]),
    ("uda", off("consistency"), "supervised entropy", "labeled weak", "", [B + U]),
    ("uda", off("consistency", "entropy"), "supervised", "labeled", "", [B]),
    ("mixmatch", {}, "supervised consistency", MIXMATCH_VIEWS, "", [2 * U, B + 2 * U]),
    ("mixmatch", {"mixed_pass": "interleaved"}, "supervised consistency", MIXMATCH_VIEWS, "", [2 * U, 8, 8, 8]),
    ("mixmatch", off("consistency"), "supervised", "labeled", "", [B]),
    ("remixmatch", {}, REMIXMATCH, REMIXMATCH_VIEWS, R_A, [U, B + 3 * U, 2 * U]),
    ("remixmatch", {"strong_views": 1}, REMIXMATCH, STRONG, R_A, [U, B + 2 * U, 2 * U]),
    ("remixmatch", off("rotation"), "supervised mixed strong", REMIXMATCH_VIEWS, "alignment", [U, B + 3 * U, U]),
    ("remixmatch", off("strong"), "supervised mixed rotation", REMIXMATCH_VIEWS, R_A, [U, B + 3 * U, U]),
    ("remixmatch", off("strong", "rotation"), "supervised mixed", REMIXMATCH_VIEWS, "alignment", [U, B + 3 * U]),
    ("remixmatch", off("mixed"), "supervised strong rotation", STRONG, R_A, [U, B, 2 * U]),
    ("remixmatch", off("mixed", "strong"), "supervised rotation", "labeled strong", "rotation", [B, U]),
    ("featmatch", {}, "supervised consistency plain_consistency", FEATMATCH_VIEWS, "refiner memory", FEATMATCH_PASSES),
    ("featmatch", off("plain_consistency"), "supervised consistency", FEATMATCH_VIEWS, "refiner memory", FEATMATCH_PASSES),
    ("featmatch", off("consistency"), "supervised plain_consistency", FEATMATCH_VIEWS, "refiner memory", FEATMATCH_PASSES),
    ("featmatch", off("plain_consistency", "consistency"), "supervised", FEATMATCH_LABELED, "refiner", [3 * B]),
    ("label_propagation", {}, "supervised pseudo_label", "labeled weak", "memory", [B + U]),
    ("label_propagation", off("pseudo_label"), "supervised", "labeled", "", [B]),
    ("plcb", {}, "mixed class_balance entropy", "labeled weak", "memory", [B + U, B + U]),
    ("plcb", {"label_images": "plain"}, "mixed class_balance entropy", PLAIN_VIEWS, "memory", [B + U, B + U]),
    ("plcb", off("class_balance"), "mixed entropy", "labeled weak", "memory", [B + U, B + U]),
    ("plcb", off("entropy"), "mixed class_balance", "labeled weak", "memory", [B + U, B + U]),
    ("fixmatch", {}, "supervised pseudo_label", STRONG, "", [B + 2 * U]),
    ("fixmatch", off("pseudo_label"), "supervised", "labeled", "", [B]),
    ("fixmatch", off("unlabeled"), "supervised", "labeled", "", [B]),
    ("fixmatch", off("supervised"), "pseudo_label", "weak strong", "", [2 * U]),
    ("flexmatch", {}, "supervised pseudo_label", STRONG, "mask", [B + 2 * U]),
    ("freematch", {}, "supervised pseudo_label fairness", STRONG, "mask", [B + 2 * U]),
    ("freematch", off("fairness"), "supervised pseudo_label", STRONG, "mask", [B + 2 * U]),
    ("freematch", off("unlabeled"), "supervised", "labeled", "", [B]),
    ("softmatch", {}, "supervised pseudo_label", STRONG, "mask", [B + 2 * U]),
    ("adamatch", {}, "supervised pseudo_label", STRONG, "mask", [B + 2 * U]),
    ("crmatch", {}, S + P + D + R, STRONG, Z_H, [B + 5 * U]),
    ("crmatch", {"projection": "none"}, S + P + D + R, STRONG, "rotation", [B + 5 * U]),
    ("crmatch", {"pair": "weak-weak"}, S + P + D + R, "labeled weak strong second_weak", Z_H, [B + 6 * U]),
    ("crmatch", {"pair": "strong-strong"}, S + P + D + R, "labeled weak strong second_strong", Z_H, [B + 6 * U]),
    ("crmatch", EXTRA_IMAGES, S + P + D + R, "labeled weak strong rotation", Z_H, [B + 2 * U + 4 * EXTRA]),
    ("crmatch", off("feature_distance"), S + P + R, STRONG, "rotation", [B + 5 * U]),
    ("crmatch", off("feature_distance") | {"pair": "weak-weak"}, S + P + R, STRONG, "rotation", [B + 5 * U]),
    ("crmatch", off("feature_distance") | {"pair": "strong-strong"}, S + P + R, STRONG, "rotation", [B + 5 * U]),
    ("crmatch", off("rotation"), S + P + D, STRONG, "projection", [B + 2 * U]),
    ("crmatch", off("rotation") | EXTRA_IMAGES, S + P + D, STRONG, "projection", [B + 2 * U]),
    ("crmatch", off("feature_distance", "rotation"), S + P, STRONG, "", [B + 2 * U]),
    ("crmatch", off("pseudo_label"), S + D + R, STRONG, Z_H, [B + 5 * U]),
    ("crmatch", off("pseudo_label") | {"pair": "weak-weak"}, S + D + R, "labeled weak second_weak", Z_H, [B + 5 * U]),
    ("crmatch", off("unlabeled"), S + R, "labeled weak", "rotation", [B + 4 * U]),
    ("crmatch", off("unlabeled") | {"rotation_images": 3}, S + R, "labeled weak", "rotation", [B + 4 * 3]),
    ("crmatch", off("unlabeled") | {"pair": "strong-strong"}, S + R, "labeled weak", "rotation", [B + 4 * U]),
    ("crmatch", off("unlabeled") | EXTRA_IMAGES, S + R, "labeled rotation", "rotation", [B + 4 * EXTRA]),
    ("crmatch", off("unlabeled", "rotation"), S, "labeled", "", [B]),
    ("crmatch", off("supervised"), P + D + R, "weak strong", Z_H, [5 * U]),
    ("crmatch", off("supervised") | {"rotation_source": "labeled+unlabeled"}, P + D + R, STRONG, Z_H, [4 * B + 5 * U]),
    ("crmatch", off("supervised", "unlabeled"), R, "weak", "rotation", [4 * U]),
    ("crmatch", off("supervised", "feature_distance", "rotation"), P, "weak strong", "", [2 * U]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "terms", "views", "heads", "student", "teacher"), [(*c, [])[:7] for c in CASES])
def test_there_are_exactly_the_terms_views_heads_and_images_that_the_weights_ask_for(
    name, changes, terms, views, heads, student, teacher
):
    method = make(name, changes)
    assert [view.name for view in method.views] == views.split()
    assert list(make_network(method).heads) == heads.split()
    case = take(method)
    assert list(case.found.terms) == terms.split()
    assert case.found.weights.keys() == case.found.terms.keys()
    assert case.images_by_network() == (student, teacher)


def test_a_view_that_no_term_needs_is_not_asked_for():
    """Without pseudo-labels and without a threshold nothing looks at the weak view of a strong pair."""
    method = build_method(
        "crmatch",
        {"pair": "strong-strong", "distance_uses_threshold": False, "pseudo_label_weight": 0, "rotation_weight": 0},
    )
    assert [view.name for view in method.views] == ["labeled", "strong", "second_strong"]


def test_views_have_the_sources_and_augmentations_of_the_papers():
    kinds = {}
    for name, changes, *_ in CASES:
        if name != "remixmatch":
            kinds |= {view.name: f"{view.augmentation} {view.source}" for view in make(name, changes).views}
    strong = {name: kind for name, kind in kinds.items() if "strong" in name}
    featmatch = {name: kind for name, kind in strong.items() if name[-1].isdigit()}  # not cropped or mirrored before
    assert {kind for name, kind in featmatch.items() if name.startswith("labeled")} == {"strong_only labeled"}
    assert {kind for name, kind in featmatch.items() if not name.startswith("labeled")} == {"strong_only unlabeled"}
    assert {kind for name, kind in strong.items() if name not in featmatch} == {"strong unlabeled"}
    assert {name: kind for name, kind in kinds.items() if name not in strong} == {
        "labeled": "weak labeled",
        "weak": "weak unlabeled",
        "second_weak": "weak unlabeled",
        "rotation": "weak extra",
        "plain_labeled": "none labeled",
        "plain": "none unlabeled",
    }
    for labeled in ("strong", "weak"):
        remixmatch = build_method("remixmatch", {"strong_views": 2, "labeled_augmentation": labeled})
        kinds = [f"{view.augmentation} {view.source}" for view in remixmatch.views]
        assert kinds == [f"{labeled} labeled", "weak unlabeled", "strong unlabeled", "strong unlabeled"]


def test_only_an_independent_draw_for_rotation_needs_extra_images():
    sizes = [
        build_method("crmatch", changes).extra_batch_size
        for changes in ({}, {"rotation_images": 16}, EXTRA_IMAGES, EXTRA_IMAGES | {"rotation_weight": 0})
    ]
    assert sizes == [0, 0, EXTRA, 0]


# method, term, full weight, published length of run and ramp
RAMPS = [
    *((name, "consistency", weight, 2**20, 419_430.4)
      for name, weight in [("pi_model", 10), ("mean_teacher", 50), ("ict", 50), ("vat", 0.3)]),
    ("pseudo_label", "pseudo_label", 1, 2**20, 419_430.4),
    ("mixmatch", "consistency", 100, 2**20, 16_384),
    ("remixmatch", "mixed", 1.5, 2**20, 16_384),
    ("remixmatch", "strong", 0.5, 2**20, 16_384),
    ("featmatch", "consistency", 0.5, 183_000, 75_000),
    ("featmatch", "plain_consistency", 2, 183_000, 75_000),
]  # fmt: skip


@pytest.mark.parametrize("shorter", [1, 4, 1000])
@pytest.mark.parametrize(("name", "term", "weight", "published", "published_ramp"), RAMPS)
def test_weights_ramp_up_linearly_over_their_share_of_the_run_but_not_within_fewer_than_16_384_steps(
    name, term, weight, published, published_ramp, shorter
):
    total = published // shorter
    steps = max(published_ramp * total / published, 16_384)
    for number in {total // 30, int(steps // 2), math.ceil(steps), 9 * total // 10}:
        found = take(make(name), number=number, total=total).found.weights
        assert found[term] == pytest.approx(weight * reference.ramp(number, steps), rel=1e-12)
        others = {other: value for other, value in found.items() if "supervised" in other or other == "rotation"}
        assert all(value == (0.5 if other == "rotation" else 1) for other, value in others.items())
