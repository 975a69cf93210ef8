"""Pi-model: two weak views of an image should get the same prediction, one of them without gradient."""

from __future__ import annotations

import pytest
from kit import assert_no_gradient, assert_rows, assert_terms, take

from crmatch.methods import PiModel
from reference import baseline_formulas as reference


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
    ramp = reference.ramp_in_run(3, method.ramp_share * 2**20, 10)
    assert_terms(case, terms, {"supervised": 1.0, "consistency": ramp * method.consistency_weight})


def test_the_target_view_gets_no_gradient():
    case = take(PiModel())
    targets = [reference.softmax(row) for row in case.logits("weak")]
    expected = reference.squared_difference_gradient(targets, case.logits("second_weak"))
    assert_rows(case.gradient("consistency", "second_weak"), expected)
    assert_no_gradient(case, "consistency", "weak")
