"""MixMatch: guessed labels, and MixUp over labeled and unlabeled images together."""

from __future__ import annotations

import pytest
import torch
from kit import CLASSES, LABELED, assert_rows, assert_terms, same, take

from crmatch.methods import MixMatch
from crmatch.methods.mixup import draw_mixing
from reference import baseline_formulas as reference

NAMES = ["labeled", "weak", "second_weak"]
VARIANTS = [
    {},
    {"temperature": 0.9, "mixup_alpha": 0.75, "consistency_weight": 75.0},
    {"share_per": "batch"},
    {"mixed_pass": "interleaved"},
    {"mixed_pass": "interleaved", "share_per": "batch", "temperature": 1.0},
]
SIZES = [{}, {"labeled": 5, "unlabeled": 5}, {"labeled": 3, "unlabeled": 2}]


def draws(method, case):
    union = torch.cat([case.batch.views[name] for name in NAMES])
    mixing = draw_mixing(union, method.mixup_alpha, case.step.generator("mixup"), per=method.share_per)
    return mixing.share.tolist(), mixing.partner.tolist()


def guess_pass(case):
    """The pass that guesses labels: over both weak views, without gradient."""
    (record,) = [record for record in case.passes if not record.with_gradient]
    return record


def mixed_passes(case):
    return [record for record in case.passes if record.with_gradient]


def groups(method, case):
    """Rows of the union in each of the mixed passes."""
    rows = sum(len(case.batch.views[name]) for name in NAMES)
    return reference.interleaved(rows, 3 if method.mixed_pass == "interleaved" else 1)


def mixed_logits(method, case):
    """Logits of the mixed images in the order of the union."""
    rows = {}
    for group, record in zip(groups(method, case), mixed_passes(case), strict=True):
        rows |= dict(zip(group, record.outputs.logits.tolist(), strict=True))
    return [rows[row] for row in range(len(rows))]


def mixed_targets(method, case):
    unlabeled = len(case.batch.views["weak"])
    guesses = guess_pass(case).outputs.logits.tolist()
    guessed = reference.guessed([guesses[:unlabeled], guesses[unlabeled:]], method.temperature)
    labels = [reference.one_hot(label, CLASSES) for label in case.batch.labels.tolist()]
    return reference.mixed(labels + guessed + guessed, *draws(method, case)).tolist()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_term_equals_the_loop_over_images(changes, sizes):
    method = MixMatch(**changes)
    case = take(method, number=100, total=2**14, **sizes)
    labeled = len(case.batch.labels)
    targets, rows = mixed_targets(method, case), mixed_logits(method, case)
    predictions = [reference.softmax(row) for row in rows]
    terms = {
        "supervised": reference.soft_cross_entropy(targets[:labeled], rows[:labeled]),
        "consistency": reference.mean_squared_difference(targets[labeled:], predictions[labeled:]),
    }
    ramp = reference.ramp_in_run(100, 16_384, 2**14)
    assert_terms(case, terms, {"supervised": 1.0, "consistency": method.consistency_weight * ramp})


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_the_images_that_go_in_are_the_union_mixed_image_by_image(changes, sizes):
    method = MixMatch(**changes)
    case = take(method, **sizes)
    views = case.batch.views
    assert torch.equal(guess_pass(case).images, torch.cat([views["weak"], views["second_weak"]]))
    union = torch.cat([views[name] for name in NAMES]).numpy()
    expected = torch.from_numpy(reference.mixed(union, *draws(method, case)))
    for group, record in zip(groups(method, case), mixed_passes(case), strict=True):
        assert same(record.images, expected[group])


def test_the_gradient_is_that_of_fixed_guesses():
    method = MixMatch()
    case = take(method)
    (record,) = mixed_passes(case)
    targets, rows = mixed_targets(method, case), mixed_logits(method, case)
    zeros = [[0.0] * CLASSES] * len(rows)
    by_labeled = reference.cross_entropy_gradient(targets[:LABELED], rows[:LABELED])
    by_unlabeled = reference.squared_difference_gradient(targets[LABELED:], rows[LABELED:])
    assert_rows(case.gradient("supervised", record.images), by_labeled + zeros[LABELED:])
    assert_rows(case.gradient("consistency", record.images), zeros[:LABELED] + by_unlabeled)
