"""MixMatch: guessed labels, and MixUp over labeled and unlabeled images together (spec 4.3)."""

from __future__ import annotations

import pytest
import torch
from recorded_passes import (
    CLASSES,
    LABELED,
    UNLABELED,
    assert_doubling_adds_exactly_its_term,
    assert_rows,
    assert_terms,
    images_by_network,
    same,
    take,
    weight_fields,
)

from crmatch.augment.views import View
from crmatch.methods.mixmatch import MixMatch
from crmatch.methods.mixup import draw_mixing
from reference import baseline_formulas as reference

VIEWS = (View("labeled", "labeled", "weak"), View("weak", "unlabeled", "weak"), View("second_weak", "unlabeled", "weak"))
NAMES = [view.name for view in VIEWS]
VARIANTS = [
    {},
    {"temperature": 0.9, "mixup_alpha": 0.75, "consistency_weight": 75.0},
    {"share_per": "batch"},
    {"mixed_pass": "interleaved"},
    {"mixed_pass": "interleaved", "share_per": "batch", "temperature": 1.0},
]
SIZES = [{}, {"labeled": 5, "unlabeled": 5}, {"labeled": 3, "unlabeled": 2}]


def draws(method, case):
    count = sum(len(case.batch.views[name]) for name in NAMES)
    mixing = draw_mixing(count, method.mixup_alpha, case.step.generator("mixup"), torch.device("cpu"), per=method.share_per)
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
    assert_terms(case, terms, {"supervised": 1.0, "consistency": method.consistency_weight * 100 / 256})


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


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_every_image_stays_mostly_itself_with_a_share_of_its_own_or_one_for_all(per):
    method = MixMatch(share_per=per)
    shares, partners = draws(method, take(method))
    assert min(shares) >= 0.5
    assert len(set(shares)) == (len(shares) if per == "sample" else 1)
    assert sorted(partners) == list(range(LABELED + 2 * UNLABELED))


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


def test_a_lower_temperature_makes_guesses_more_certain():
    entropies = []
    for temperature in (1.0, 0.5, 0.25):
        case = take(MixMatch(temperature=temperature))
        logits = guess_pass(case).outputs.logits.tolist()
        guessed = reference.guessed([logits[:UNLABELED], logits[UNLABELED:]], temperature)
        entropies.append(max(max(row) for row in guessed))
    assert entropies == sorted(entropies)
    values = [take(MixMatch(temperature=temperature)).found.terms["consistency"].item() for temperature in (1.0, 0.5)]
    assert values[0] != pytest.approx(values[1], rel=1e-3)


@pytest.mark.parametrize("changes", [{}, {"mixed_pass": "interleaved"}], ids=str)
def test_only_the_first_mixed_pass_moves_running_statistics(changes):
    case = take(MixMatch(**changes))
    assert not guess_pass(case).moved
    assert guess_pass(case).training
    assert [record.moved for record in mixed_passes(case)] == [True] + [False] * (len(mixed_passes(case)) - 1)


def test_each_image_is_guessed_once_and_mixed_once():
    assert MixMatch().views == VIEWS
    union = LABELED + 2 * UNLABELED
    assert images_by_network(take(MixMatch()).passes) == {"student": [2 * UNLABELED, union], "teacher": []}
    interleaved = images_by_network(take(MixMatch(mixed_pass="interleaved")).passes)["student"]
    assert interleaved[0] == 2 * UNLABELED
    assert sum(interleaved[1:]) == union
    assert len(interleaved) == 4


@pytest.mark.parametrize(("total", "steps"), [(2**20, 16384), (2**16, 1024), (1000, 16), (10, 1)])
def test_the_weight_rises_over_16384_of_a_million_steps_and_over_the_same_share_of_other_runs(total, steps):
    assert reference.scaled_steps(16384, total) == steps
    for number in {0, steps // 2, steps, 9 * total // 10}:
        weight = take(MixMatch(), number=number, total=total).found.weights["consistency"]
        assert weight == pytest.approx(100 * reference.ramp(number, steps), rel=1e-12)


@pytest.mark.parametrize("field", weight_fields(MixMatch))
def test_doubling_a_weight_adds_exactly_its_term_to_the_total(field):
    assert_doubling_adds_exactly_its_term(MixMatch(), field)


def test_a_weight_of_zero_removes_the_term():
    case = take(MixMatch(consistency_weight=0))
    assert list(case.found.terms) == list(case.found.weights) == ["supervised"]
