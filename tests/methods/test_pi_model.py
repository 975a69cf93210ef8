"""Pi-model: two weak views of an image should be predicted alike, one of them held fixed (spec 4.11)."""

from __future__ import annotations

import pytest
from recorded_passes import (
    CLASSES,
    LABELED,
    UNLABELED,
    assert_doubling_adds_exactly_its_term,
    assert_rows,
    assert_terms,
    images_by_network,
    take,
    weight_fields,
)

from crmatch.augment.views import View
from crmatch.methods.pi_model import PiModel
from reference import baseline_formulas as reference

VIEWS = (View("labeled", "labeled", "weak"), View("weak", "unlabeled", "weak"), View("second_weak", "unlabeled", "weak"))


@pytest.mark.parametrize("changes", [{}, {"consistency_weight": 20.0, "ramp_share": 0.8}], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"labeled": 5, "unlabeled": 3}], ids=["more unlabeled", "more labeled"])
def test_every_term_equals_the_loop_over_images(changes, sizes):
    method = PiModel(**changes)
    case = take(method, number=3, total=10, **sizes)
    targets, found = ([reference.softmax(row) for row in case.logits(view)] for view in ("weak", "second_weak"))
    terms = {
        "supervised": reference.supervised(case.batch.labels.tolist(), case.logits("labeled")),
        "consistency": reference.mean_squared_difference(targets, found),
    }
    ramp = reference.ramp(3, method.ramp_share * 10)
    assert_terms(case, terms, {"supervised": 1.0, "consistency": ramp * method.consistency_weight})


def test_the_weight_is_10_after_two_fifths_of_the_run():
    weights = [take(PiModel(), number=step, total=100).found.weights["consistency"] for step in (0, 10, 40, 99)]
    assert weights == [0, 2.5, 10, 10]


def test_the_target_view_is_held_fixed():
    case = take(PiModel())
    targets = [reference.softmax(row) for row in case.logits("weak")]
    expected = reference.squared_difference_gradient(targets, case.logits("second_weak"))
    assert_rows(case.gradient("consistency", "second_weak"), expected)
    assert_rows(case.gradient("consistency", "weak"), [[0.0] * CLASSES] * UNLABELED)


def test_the_student_sees_every_view_once_and_the_teacher_none():
    assert PiModel().views == VIEWS
    case = take(PiModel())
    seen = images_by_network(case.passes)
    assert seen["teacher"] == []
    assert sum(seen["student"]) == LABELED + 2 * UNLABELED
    assert len(seen["student"]) <= 3


@pytest.mark.parametrize("field", weight_fields(PiModel))
def test_doubling_a_weight_adds_exactly_its_term_to_the_total(field):
    assert_doubling_adds_exactly_its_term(PiModel(), field)


def test_a_weight_of_zero_removes_term_and_views():
    method = PiModel(consistency_weight=0)
    assert method.views == VIEWS[:1]
    case = take(method)
    assert list(case.found.terms) == ["supervised"]
    assert images_by_network(case.passes)["student"] == [LABELED]
