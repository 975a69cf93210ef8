"""UDA: the strong view should get the sharpened prediction on the weak view, if that is confident."""

from __future__ import annotations

import pytest
from kit import THRESHOLD, assert_no_gradient, assert_rows, assert_terms, case_of_logits, make_models, take

from crmatch.methods import UDA
from reference import baseline_formulas as reference


def expected_terms(method, case):
    weak, labels, labeled = case.logits("weak"), case.batch.labels.tolist(), case.logits("labeled")
    consistency, used = reference.uda_consistency(
        weak, case.logits("strong"), method.temperature, method.threshold, method.ties
    )
    terms = {"supervised": reference.supervised(labels, labeled), "consistency": consistency}
    if method.tsa != "off":
        terms["supervised"], _ = reference.tsa_supervised(labels, labeled, method.tsa, case.step.number, case.step.total)
    if method.entropy_weight:
        terms["entropy"] = reference.mean_entropy(weak)
    return terms, used


@pytest.mark.parametrize("ties", ["exclude", "include"])
@pytest.mark.parametrize("temperature", [0.4, 1.0])
@pytest.mark.parametrize("changes", [{}, {"entropy_weight": 0.1, "consistency_weight": 2.0}], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"labeled": 5, "unlabeled": 9}], ids=str)
def test_every_term_equals_the_loop_over_images(changes, temperature, ties, sizes):
    method = UDA(threshold=THRESHOLD, temperature=temperature, ties=ties, **changes)
    case = take(method, **sizes)
    terms, used = expected_terms(method, case)
    assert 0 < sum(used) < len(used)
    assert case.found.pseudo_labels.used.tolist() == used
    weights = {"supervised": 1.0, "consistency": method.consistency_weight, "entropy": method.entropy_weight}
    assert_terms(case, terms, {name: weights[name] for name in terms})


@pytest.mark.parametrize("schedule", ["linear", "exp", "log"])
def test_labeled_images_that_are_predicted_too_well_are_left_out_as_training_goes_on(schedule):
    method, kept = UDA(tsa=schedule), []
    for number in (0, 2, 5, 9):
        case = take(method, number=number, total=10, labeled=12, models=make_models(method, confidence=2.0))
        terms, _ = expected_terms(method, case)
        assert_terms(case, terms)
        _, count = reference.tsa_supervised(case.batch.labels.tolist(), case.logits("labeled"), schedule, number, 10)
        kept.append(count)
    assert kept == sorted(kept)
    assert 0 < kept[0] < kept[-1]


def test_the_released_probability_goes_from_1_in_c_to_1_at_the_pace_of_its_schedule():
    at = [0, 50, 100]
    assert [reference.tsa_threshold("linear", step, 100, 4) for step in at] == [0.25, 0.625, 1]
    assert [round(reference.tsa_threshold("exp", step, 100, 4), 4) for step in at] == [0.2551, 0.3116, 1]
    assert [round(reference.tsa_threshold("log", step, 100, 4), 4) for step in at] == [0.25, 0.9384, 0.9949]


def test_a_batch_without_any_kept_labeled_image_gives_zero_and_no_gradient():
    rows = [[9.0, 0.0], [0.0, 9.0]]
    case = case_of_logits(UDA(tsa="linear"), [0, 1], labeled=rows, weak=rows, strong=rows)
    assert case.found.terms["supervised"].item() == 0
    assert_no_gradient(case, "supervised", case.passes[0].images)


def test_targets_carry_no_gradient_and_unconfident_images_give_none():
    method = UDA(threshold=THRESHOLD)
    case = take(method)
    weak = case.logits("weak")
    _, used = reference.uda_consistency(weak, case.logits("strong"), 0.4, THRESHOLD)
    targets = [reference.softmax([value / 0.4 for value in row]) for row in weak]
    expected = reference.cross_entropy_gradient(targets, case.logits("strong"), used)
    assert_rows(case.gradient("consistency", "strong"), expected)
    assert_no_gradient(case, "consistency", "weak")
    assert_no_gradient(case, "consistency", "labeled")


def test_the_entropy_is_lowered_through_the_weak_prediction():
    case = take(UDA(entropy_weight=0.1))
    assert_rows(case.gradient("entropy", "weak"), reference.entropy_gradient(case.logits("weak")))
    assert_no_gradient(case, "entropy", "strong")
