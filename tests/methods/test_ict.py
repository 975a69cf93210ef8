"""ICT: the prediction between two images should be the teacher's predictions mixed alike (spec 4.11)."""

from __future__ import annotations

import pytest
import torch
from recorded_passes import (
    LABELED,
    UNLABELED,
    assert_doubling_adds_exactly_its_term,
    assert_no_gradient_reaches_the_teacher,
    assert_rows,
    assert_terms,
    images_by_network,
    same,
    take,
    weight_fields,
)

from crmatch.augment.views import View
from crmatch.methods.ict import ICT
from crmatch.methods.mixup import draw_mixing
from reference import baseline_formulas as reference

VIEWS = (View("labeled", "labeled", "weak"), View("weak", "unlabeled", "weak"))


def draws(method, case):
    count = len(case.batch.views["weak"])
    mixing = draw_mixing(count, method.mixup_alpha, case.step.generator("mixup"), torch.device("cpu"), partner="reversed")
    return mixing.share.tolist(), [count - 1 - position for position in range(count)]


def mixed_pass(case):
    """The student's pass that is not over labeled images."""
    (record,) = [record for record in case.passes if record.network == "student" and not record.moved]
    return record


def mixed_targets(method, case):
    return reference.mixed([reference.softmax(row) for row in case.logits("weak", "teacher")], *draws(method, case)).tolist()


@pytest.mark.parametrize("changes", [{}, {"mixup_alpha": 0.75, "consistency_weight": 1000.0}, {"ramp_share": 0.9}], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"labeled": 5, "unlabeled": 3}], ids=["even batch", "odd batch"])
def test_every_term_equals_the_loop_over_images(changes, sizes):
    method = ICT(**changes)
    case = take(method, number=3, total=10, **sizes)
    found = [reference.softmax(row) for row in mixed_pass(case).outputs.logits.tolist()]
    terms = {
        "supervised": reference.supervised(case.batch.labels.tolist(), case.logits("labeled")),
        "consistency": reference.mean_squared_difference(mixed_targets(method, case), found),
    }
    ramp = reference.ramp(3, method.ramp_share * 10)
    assert_terms(case, terms, {"supervised": 1.0, "consistency": ramp * method.consistency_weight})


@pytest.mark.parametrize("sizes", [{}, {"unlabeled": 3}], ids=["even batch", "odd batch"])
def test_each_image_is_mixed_with_its_mirror_in_the_batch_by_a_share_of_its_own_of_at_least_half(sizes):
    method = ICT()
    case = take(method, **sizes)
    shares, partners = draws(method, case)
    assert min(shares) >= 0.5
    assert len(set(shares)) == len(shares)
    expected = torch.from_numpy(reference.mixed(case.batch.views["weak"].numpy(), shares, partners))
    assert same(mixed_pass(case).images, expected)


def test_the_gradient_is_that_of_fixed_targets():
    method = ICT()
    case = take(method)
    rows = mixed_pass(case).outputs.logits.tolist()
    expected = reference.squared_difference_gradient(mixed_targets(method, case), rows)
    assert_rows(case.gradient("consistency", mixed_pass(case).images), expected)
    assert_no_gradient_reaches_the_teacher(case)


def test_the_teacher_predicts_the_unmixed_images_in_training_mode_without_gradient():
    assert ICT().views == VIEWS
    case = take(ICT())
    assert images_by_network(case.passes) == {"student": [LABELED, UNLABELED], "teacher": [UNLABELED]}
    (teacher,) = [record for record in case.passes if record.network == "teacher"]
    assert torch.equal(teacher.images, case.batch.views["weak"])
    assert teacher.training
    assert not teacher.with_gradient


def test_two_steps_draw_different_shares_and_one_step_the_same():
    first, again, second = (mixed_pass(take(ICT(), number=number)).images for number in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_the_weight_is_50_after_two_fifths_of_the_run():
    weights = [take(ICT(), number=step, total=100).found.weights["consistency"] for step in (0, 10, 40, 99)]
    assert weights == [0, 12.5, 50, 50]


@pytest.mark.parametrize("field", weight_fields(ICT))
def test_doubling_a_weight_adds_exactly_its_term_to_the_total(field):
    assert_doubling_adds_exactly_its_term(ICT(), field)


def test_a_weight_of_zero_removes_term_views_and_teacher():
    method = ICT(consistency_weight=0)
    assert method.views == VIEWS[:1]
    case = take(method)
    assert list(case.found.terms) == ["supervised"]
    assert images_by_network(case.passes) == {"student": [LABELED], "teacher": []}
