"""Confidence rules of FixMatch and CR-Match: pseudo-labels and the weight of every image, over successive steps."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from kit import CLASSES, POOL, assert_no_gradient, assert_rows, assert_terms, case_of_logits, layers_of, take_steps

from crmatch.methods import UDA, CRMatch, FixMatch, PseudoLabel, build_method
from reference import crmatch_formulas
from reference.crmatch_formulas import supervised_loss
from reference.mask_formulas import Rule, weighted_pseudo_label

MASKS, ALIGNMENTS = ["fixed", "flex", "free", "soft", "ada"], ["none", "uniform", "labeled"]
OPTIONS = [
    *({"mask": mask, "alignment": alignment} for mask, alignment in itertools.product(MASKS, ALIGNMENTS)),
    {"mask": "fixed", "pseudo_labels": "soft", "ties": "include"},
    {"mask": "free", "free_quantile": 0.8},
    {"mask": "free", "free_clip": 0.5},
    {"mask": "free", "fairness_weight": 0},
    {"mask": "soft", "soft_sigmas": 3.0},
    {"mask": "flex", "ties": "include", "threshold": 0.55},
    {"mask": "ada", "alignment": "labeled", "ties": "include", "threshold": 0.9},
    {"mask": "free", "pseudo_labels": "soft", "alignment": "uniform"},
    {"mask": "soft", "pseudo_labels": "soft", "alignment": "uniform"},
]


def make(options, cls=FixMatch, **changes):
    threshold = 0.5 if options["mask"] == "flex" else 0.85
    return cls(**{"average_decay": 0.6, "threshold": threshold, **options, **changes})


def rule_of(method):
    fields = ("mask", "alignment", "threshold", "ties", "average_decay", "free_quantile", "free_clip", "soft_sigmas")
    return Rule(CLASSES, POOL, **{field: getattr(method, field) for field in fields})


def run_steps(method, steps=5, models=None, start=0, unlabeled=12):
    return take_steps(method, steps, models, start, unlabeled=unlabeled)


def ask(rule, case):
    return rule.step(case.logits("weak"), case.logits("labeled"), case.batch.unlabeled.tolist())


def expected_terms(method, rule, case):
    labels, probabilities, weights = ask(rule, case)
    strong = case.logits("strong")
    terms = {
        "supervised": supervised_loss(case.batch.labels.tolist(), case.logits("labeled")),
        "pseudo_label": weighted_pseudo_label(labels if method.pseudo_labels == "hard" else probabilities, strong, weights),
    }
    if method.mask == "free" and method.fairness_weight:
        terms["fairness"] = rule.fairness(strong, weights)
    return terms, labels, weights


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_terms_labels_and_weights_of_successive_steps_equal_the_loop_over_images(options):
    method = make(options)
    rule, seen = rule_of(method), []
    for case in run_steps(method):
        terms, labels, weights = expected_terms(method, rule, case)
        assert case.found.pseudo_labels.labels.tolist() == labels
        assert_rows(case.found.pseudo_labels.used.tolist(), weights)
        assert_terms(case, terms)
        assert not any(record.network == "teacher" for record in case.passes)
        seen += weights
    assert 0 < sum(seen) < len(seen)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_crmatch_weighs_feature_distances_as_it_weighs_pseudo_labels(options):
    method = make(options, CRMatch, rotation_weight=0, clamp=False)
    rule = rule_of(method)
    for case in run_steps(method, steps=3):
        terms, _, weights = expected_terms(method, rule, case)
        projection = layers_of(case.models.student.heads["projection"])
        strong, weak = (
            [
                crmatch_formulas.layers(crmatch_formulas.flattened(image), projection)
                for image in case.outputs(view).feature_map.numpy()
            ]
            for view in ("strong", "weak")
        )
        distances = [crmatch_formulas.cosine(one, other) for one, other in zip(strong, weak, strict=True)]
        terms["feature_distance"] = sum(w * d for w, d in zip(weights, distances, strict=True)) / len(weights)
        assert_terms(case, terms)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_reach_the_strong_images_that_count_and_nothing_else(options):
    method = make(options)
    case = run_steps(method, steps=3)[-1]
    used = case.found.pseudo_labels.used.tolist()
    for term in case.found.terms.keys() - {"supervised"}:
        assert_no_gradient(case, term, "weak")
        assert_no_gradient(case, term, "labeled")
        reached = [any(row) for row in case.gradient(term, "strong")]
        assert reached == [weight > 0 for weight in used], term


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("flexmatch", {"mask": "flex", "alignment": "none"}),
        ("freematch", {"mask": "free", "alignment": "none", "fairness_weight": 0.001}),
        ("softmatch", {"mask": "soft", "alignment": "uniform", "soft_sigmas": 2}),
        ("adamatch", {"mask": "ada", "alignment": "labeled"}),
        ("fixmatch", {"mask": "fixed", "alignment": "none"}),
        ("crmatch", {"mask": "fixed", "alignment": "none"}),
    ],
)
def test_later_methods_are_presets_of_fixmatch(name, fields):
    method = build_method(name)
    assert isinstance(method, FixMatch)
    assert {field: getattr(method, field) for field in fields} == fields
    assert (method.threshold, method.average_decay) == (0.95, None)


def test_running_averages_have_by_default_the_decay_of_the_weights_moving_average():
    states = []
    for decay in (None, 0.999):
        case = run_steps(make({"mask": "free", "alignment": "uniform"}, average_decay=decay), steps=2)[-1]
        states.append(case.models.student.state("mask"))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(("ties", "used"), [("exclude", [False, True]), ("include", [True, True])])
@pytest.mark.parametrize("method", [FixMatch, CRMatch, UDA, PseudoLabel])
def test_a_confidence_equal_to_the_threshold_is_used_only_if_ties_are_included(method, ties, used):
    rows = [[3.0, 3.0], [3.0, 2.0]]
    case = case_of_logits(method(threshold=0.5, ties=ties), [0, 1], labeled=rows, weak=rows, strong=rows)
    assert case.found.pseudo_labels.used.tolist() == used


@pytest.mark.parametrize(("ties", "used"), [("exclude", False), ("include", True)])
def test_ties_with_a_moving_threshold_are_treated_alike_and_flexmatch_remembers_them_anyway(ties, used):
    row = [3.0, 3.0]
    case = case_of_logits(FixMatch(mask="ada", threshold=1, ties=ties), [0], labeled=[row], weak=[row], strong=[row])
    assert case.found.pseudo_labels.used.tolist() == [used]
    flex = FixMatch(mask="flex", threshold=0.5, ties=ties)
    rows = {"labeled": [row], "weak": [row] * POOL, "strong": [row] * POOL}
    first = case_of_logits(flex, [0], **rows)
    assert first.found.pseudo_labels.used.tolist() == [True] * POOL
    assert case_of_logits(flex, [0], models=first.models, **rows).found.pseudo_labels.used.tolist() == [used] * POOL


def test_flexmatch_remembers_the_confident_one_of_two_looks_at_an_image():
    """A batch that crosses the end of a permutation holds an image twice."""
    method, certain, doubtful = FixMatch(mask="flex", threshold=0.9), [9.0, 0.0], [1.0, 0.0]
    for looks in ([certain, doubtful], [doubtful, certain]):
        weak = [row for row in looks for _ in range(POOL)]
        rows = {"labeled": [certain], "weak": weak, "strong": weak}
        first = case_of_logits(method, [0], positions=[*range(POOL), *range(POOL)], **rows)
        rows = {"labeled": [certain], "weak": looks, "strong": looks}
        second = case_of_logits(method, [0], models=first.models, **rows)
        assert all(first.found.pseudo_labels.used)
        assert second.found.pseudo_labels.used.tolist() == [row == certain for row in looks]


def test_a_softmatch_batch_of_one_image_stays_finite():
    for case in run_steps(make({"mask": "soft", "alignment": "uniform"}), steps=2, unlabeled=1):
        assert case.found.total.isfinite()


def test_adamatch_asks_less_where_labeled_images_are_predicted_with_less_confidence():
    method, weak = FixMatch(mask="ada", threshold=0.9), [[2.0, 0.0], [1.0, 0.0]]
    cases = [case_of_logits(method, [0], labeled=[row], weak=weak, strong=weak) for row in ([9.0, 0.0], [1.5, 0.0], [0.1, 0.0])]
    kept = [case.found.pseudo_labels.used.tolist() for case in cases]
    assert kept == [[False, False], [True, False], [True, True]]


def test_fairness_of_an_empty_selection_is_zero_and_gives_no_gradient():
    method, certain, doubtful = make({"mask": "free"}, average_decay=0.5), [9.0, 0.0], [0.2, 0.0]
    first = case_of_logits(method, [0], labeled=[certain], weak=[certain], strong=[certain])
    second = case_of_logits(method, [0], models=first.models, labeled=[certain], weak=[doubtful] * 2, strong=[doubtful] * 2)
    assert [case.found.pseudo_labels.used.tolist() for case in (first, second)] == [[True], [False, False]]
    assert second.found.terms["fairness"].item() == 0
    assert second.gradient("fairness", second.passes[-1].images)[1:] == [[0.0] * CLASSES] * 4


def test_the_fairness_gradient_flows_through_the_mean_strong_prediction_only():
    method = make({"mask": "free"})
    rule = rule_of(method)
    for case in run_steps(method, steps=2):
        _, _, weights = ask(rule, case)
    strong, slope = case.logits("strong"), 1e-6
    expected = []
    for row, column in itertools.product(range(len(strong)), range(CLASSES)):
        values = []
        for sign in (1, -1):
            moved = copy.deepcopy(strong)
            moved[row][column] += sign * slope
            values.append(rule.fairness(moved, weights))
        expected.append((values[0] - values[1]) / (2 * slope))
    found = [value for row in case.gradient("fairness", "strong") for value in row]
    assert_rows(found, expected, tolerance=1e-8)
