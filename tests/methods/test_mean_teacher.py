"""Mean Teacher: the student on one weak view follows the averaged teacher on another (spec 4.2)."""

from __future__ import annotations

import pytest
import torch
from crmatch_cases import layers_of
from recorded_passes import (
    CLASSES,
    LABELED,
    UNLABELED,
    assert_doubling_adds_exactly_its_term,
    assert_no_gradient_reaches_the_teacher,
    assert_rows,
    assert_terms,
    images_by_network,
    make_network,
    take,
    weight_fields,
)

from crmatch.augment.views import View
from crmatch.methods.mean_teacher import MeanTeacher
from reference import baseline_formulas as reference

VIEWS = (View("labeled", "labeled", "weak"), View("weak", "unlabeled", "weak"), View("second_weak", "unlabeled", "weak"))
VARIANTS = [
    {},
    {"label_smoothing": 0.1},
    {"consistency_weight": 7.0, "ramp_share": 0.9},
    {"ramp_shape": "sigmoid", "ramp_share": 1.0},
    {"logit_distance_weight": 0.01},
    {"logit_distance_weight": 0.5, "label_smoothing": 0.001},
]


def targets_of(case):
    return [reference.softmax(row) for row in case.logits("weak", "teacher")]


def second_head(case, view):
    """Logits of the consistency head, from the pooled features."""
    ((weight, bias),) = layers_of(case.models.student.heads["consistency"])
    return [reference.linear(row, weight, bias) for row in case.outputs(view).features.tolist()]


def expected_terms(method, case):
    labels = case.batch.labels.tolist()
    compared = second_head(case, "second_weak") if method.logit_distance_weight else case.logits("second_weak")
    terms = {
        "supervised": reference.supervised(labels, case.logits("labeled"), method.label_smoothing),
        "consistency": reference.mean_squared_difference(targets_of(case), [reference.softmax(row) for row in compared]),
    }
    if method.logit_distance_weight:
        class_head = case.logits("labeled") + case.logits("second_weak")
        other_head = second_head(case, "labeled") + second_head(case, "second_weak")
        terms["logit_distance"] = reference.mean_squared_difference(class_head, other_head)
    return terms


@pytest.mark.parametrize("sizes", [{}, {"labeled": 5, "unlabeled": 3}], ids=["more unlabeled", "more labeled"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_term_equals_the_loop_over_images(changes, sizes):
    method = MeanTeacher(**changes)
    case = take(method, number=3, total=10, **sizes)
    ramp = reference.ramp(3, method.ramp_share * 10, method.ramp_shape)
    weights = {"supervised": 1.0, "consistency": ramp * method.consistency_weight}
    if method.logit_distance_weight:
        weights["logit_distance"] = method.logit_distance_weight
    assert_terms(case, expected_terms(method, case), weights)


@pytest.mark.parametrize("shape", ["linear", "sigmoid"])
@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("step", [0, 1, 20, 39, 40, 41, 99])
def test_the_consistency_weight_rises_over_the_given_share_of_the_run(step, share, shape):
    found = take(MeanTeacher(ramp_shape=shape, ramp_share=share), number=step, total=100).found
    assert found.weights["consistency"] == pytest.approx(50 * reference.ramp(step, share * 100, shape), rel=1e-12)
    assert found.weights["supervised"] == 1


def test_the_linear_ramp_reaches_50_after_two_fifths_of_the_run_and_the_sigmoid_starts_at_exp_minus_5():
    steps = [0, 10, 40, 99]
    assert [take(MeanTeacher(), number=step, total=100).found.weights["consistency"] for step in steps] == [0, 12.5, 50, 50]
    sigmoid = take(MeanTeacher(ramp_shape="sigmoid"), number=0, total=100).found.weights["consistency"]
    assert sigmoid == pytest.approx(50 * 0.006737946999085467, rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"logit_distance_weight": 0.01}], ids=str)
def test_student_sees_labeled_and_second_weak_images_the_teacher_weak_ones_each_once(changes):
    method = MeanTeacher(**changes)
    assert method.views == VIEWS
    case = take(method)
    assert images_by_network(case.passes) == {"student": [LABELED, UNLABELED], "teacher": [UNLABELED]}
    assert len(case.logits("labeled")) == LABELED
    assert len(case.logits("second_weak")) == len(case.logits("weak", "teacher")) == UNLABELED


def test_the_consistency_gradient_is_that_of_fixed_targets_and_not_zero():
    """USB reads the student's logits from the teacher's output: no gradient, and a row that equals supervised training."""
    case = take(MeanTeacher())
    expected = reference.squared_difference_gradient(targets_of(case), case.logits("second_weak"))
    assert_rows(case.gradient("consistency", "second_weak"), expected)
    assert all(any(abs(value) > 1e-6 for value in row) for row in expected)
    parameters = dict(case.models.student.named_parameters())
    gradients = torch.autograd.grad(case.found.terms["consistency"], list(parameters.values()), allow_unused=True)
    assert [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None or not gradient.any()] == []


def test_the_second_head_carries_the_consistency_gradient_and_the_distance_ties_both_heads():
    case = take(MeanTeacher(logit_distance_weight=0.01))
    student = case.models.student
    assert_rows(case.gradient("consistency", "second_weak"), [[0.0] * CLASSES] * UNLABELED)
    for head in (student.classifier, student.heads["consistency"]):
        (gradient,) = torch.autograd.grad(case.found.terms["logit_distance"], head.weight, retain_graph=True)
        assert gradient.any()
    (gradient,) = torch.autograd.grad(case.found.terms["consistency"], student.heads["consistency"].weight)
    assert gradient.any()


def test_the_teacher_runs_in_training_mode_without_gradient():
    case = take(MeanTeacher())
    (teacher,) = [record for record in case.passes if record.network == "teacher"]
    assert teacher.training
    assert not teacher.with_gradient
    assert not case.models.teacher.training
    assert_no_gradient_reaches_the_teacher(case)


@pytest.mark.parametrize("field", weight_fields(MeanTeacher))
def test_doubling_a_weight_adds_exactly_its_term_to_the_total(field):
    assert_doubling_adds_exactly_its_term(MeanTeacher(logit_distance_weight=0.01), field)


def test_a_weight_of_zero_removes_term_views_and_teacher():
    method = MeanTeacher(consistency_weight=0)
    assert method.views == VIEWS[:1]
    case = take(method)
    assert list(case.found.terms) == ["supervised"]
    assert images_by_network(case.passes) == {"student": [LABELED], "teacher": []}


def test_without_a_distance_weight_there_is_no_second_head():
    assert len(make_network(MeanTeacher()).heads) == 0
    assert list(make_network(MeanTeacher(logit_distance_weight=0.01)).heads) == ["consistency"]
