"""Mean Teacher: the student on one weak view follows the averaged teacher on another."""

from __future__ import annotations

import pytest
import torch
from kit import assert_no_gradient, assert_rows, assert_terms, layers_of, take

from crmatch.methods import MeanTeacher
from reference import baseline_formulas as reference

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


@pytest.mark.parametrize("sizes", [{}, {"labeled": 5, "unlabeled": 3}], ids=["more unlabeled", "more labeled"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_term_equals_the_loop_over_images(changes, sizes):
    method = MeanTeacher(**changes)
    case = take(method, number=3, total=10, **sizes)
    labels, compared = case.batch.labels.tolist(), case.logits("second_weak")
    terms, weights = {"supervised": reference.supervised(labels, case.logits("labeled"), method.label_smoothing)}, {}
    if method.logit_distance_weight:
        compared = second_head(case, "second_weak")
        class_head = case.logits("labeled") + case.logits("second_weak")
        terms["logit_distance"] = reference.mean_squared_difference(class_head, second_head(case, "labeled") + compared)
        weights["logit_distance"] = method.logit_distance_weight
    terms["consistency"] = reference.mean_squared_difference(targets_of(case), [reference.softmax(row) for row in compared])
    linear = reference.ramp_in_run(3, method.ramp_share * 2**20, 10)
    ramp = linear if method.ramp_shape == "linear" else reference.ramp(3, method.ramp_share * 10, "sigmoid")
    assert_terms(case, terms, {"supervised": 1.0, "consistency": ramp * method.consistency_weight} | weights)


@pytest.mark.parametrize("sizes", [{}, {"labeled": 5, "unlabeled": 3}], ids=["more unlabeled", "more labeled"])
@pytest.mark.parametrize("distance", [0.0, 0.01])
def test_with_a_joint_batch_every_term_equals_lp_deepssl_s_loop_over_all_images(distance, sizes):
    """One pass of student and teacher; CE of the labeled images / all images; consistency and distance on all images."""
    case = take(MeanTeacher(joint_batch=True, logit_distance_weight=distance), **sizes)
    views, images = case.batch.views, case.images_by_network()
    assert images == ([len(views["labeled"]) + len(views["weak"])],) * 2
    student = {name: case.logits(name) for name in ("labeled", "second_weak")}
    teacher = case.logits("second_labeled", "teacher") + case.logits("weak", "teacher")
    class_head = student["labeled"] + student["second_weak"]
    compared = second_head(case, "labeled") + second_head(case, "second_weak") if distance else class_head
    terms = reference.joint_mean_teacher(case.batch.labels.tolist(), class_head, compared, teacher)
    assert_terms(case, terms if distance else {name: terms[name] for name in ("supervised", "consistency")})
    (updating,) = [record for record in case.passes if record.updated_statistics]
    assert updating.network == "student"


@pytest.mark.parametrize("step", [0, 1, 20, 40, 41, 99])
def test_the_sigmoid_ramp_starts_at_exp_minus_5_and_reaches_the_weight_after_its_share_of_the_run(step):
    assert reference.ramp(0, 40, "sigmoid") == pytest.approx(0.006737946999085467, rel=1e-12)
    found = take(MeanTeacher(ramp_shape="sigmoid"), number=step, total=100).found
    assert found.weights["consistency"] == pytest.approx(50 * reference.ramp(step, 40, "sigmoid"), rel=1e-12)


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
    student, terms = case.models.student, case.found.terms
    assert_no_gradient(case, "consistency", "second_weak")
    second = student.heads["consistency"].weight
    for term, weight in [("logit_distance", student.classifier.weight), ("logit_distance", second), ("consistency", second)]:
        assert torch.autograd.grad(terms[term], weight, retain_graph=True)[0].any()
