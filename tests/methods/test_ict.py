"""ICT: the prediction on mixed images should be the mixture of the teacher's predictions."""

from __future__ import annotations

import pytest
import torch
from kit import assert_rows, assert_terms, same, take

from crmatch.methods import ICT
from crmatch.methods.mixup import draw_mixing
from reference import baseline_formulas as reference


def draws(method, case):
    images = case.batch.views["weak"]
    mixing = draw_mixing(images, method.mixup_alpha, case.step.generator("mixup"), partner="reversed")
    return mixing.share.tolist(), list(range(len(images)))[::-1]


def mixed_pass(case):
    """The student's pass that is not over labeled images."""
    (record,) = [record for record in case.passes if record.network == "student" and not record.updated_statistics]
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
    ramp = reference.ramp_in_run(3, method.ramp_share * 2**20, 10)
    assert_terms(case, terms, {"supervised": 1.0, "consistency": ramp * method.consistency_weight})


@pytest.mark.parametrize("sizes", [{}, {"unlabeled": 3}], ids=["even batch", "odd batch"])
def test_each_image_is_mixed_with_the_batch_in_reverse_order_and_its_own_share_of_at_least_half(sizes):
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
