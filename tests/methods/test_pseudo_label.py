"""Pseudo-Label: confident predictions label the very images they were made for (spec 4.11)."""

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
    case_of_logits,
    images_by_network,
    take,
    weight_fields,
)

from crmatch.augment.views import View
from crmatch.methods.pseudo_label import PseudoLabel
from reference import baseline_formulas as reference

VIEWS = (View("labeled", "labeled", "weak"), View("weak", "unlabeled", "weak"))
THRESHOLD = 0.6


@pytest.mark.parametrize("ties", ["exclude", "include"])
@pytest.mark.parametrize("changes", [{}, {"pseudo_label_weight": 2.0, "ramp_share": 0.8}], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"labeled": 7, "unlabeled": 5}], ids=["more unlabeled", "more labeled"])
def test_every_term_equals_the_loop_over_images(changes, ties, sizes):
    method = PseudoLabel(threshold=THRESHOLD, ties=ties, **changes)
    case = take(method, number=3, total=10, **sizes)
    value, used = reference.pseudo_label(case.logits("weak"), THRESHOLD, ties)
    assert 0 < sum(used) < len(used)
    terms = {"supervised": reference.supervised(case.batch.labels.tolist(), case.logits("labeled")), "pseudo_label": value}
    ramp = reference.ramp(3, method.ramp_share * 10)
    assert_terms(case, terms, {"supervised": 1.0, "pseudo_label": ramp * method.pseudo_label_weight})
    assert case.found.pseudo_labels.used.tolist() == used
    assert case.found.pseudo_labels.labels.tolist() == torch.tensor(case.logits("weak")).argmax(dim=1).tolist()


def test_the_mask_is_one_per_image_and_not_spread_over_the_batch():
    """Public code keeps a trailing axis, so that mask and loss broadcast to B x B: mean(mask) * mean(CE)."""
    case = take(PseudoLabel(threshold=THRESHOLD))
    rows = case.logits("weak")
    _, used = reference.pseudo_label(rows, THRESHOLD)
    losses = [reference.cross_entropy(row.index(max(row)), row) for row in rows]
    broadcast = reference.mean(map(float, used)) * reference.mean(losses)
    assert case.found.terms["pseudo_label"].item() != pytest.approx(broadcast, rel=1e-3)


def test_the_gradient_reaches_confident_images_only_and_treats_their_label_as_given():
    case = take(PseudoLabel(threshold=THRESHOLD))
    rows = case.logits("weak")
    _, used = reference.pseudo_label(rows, THRESHOLD)
    labels = [reference.one_hot(row.index(max(row)), len(row)) for row in rows]
    assert_rows(case.gradient("pseudo_label", "weak"), reference.cross_entropy_gradient(labels, rows, used))


@pytest.mark.parametrize(("ties", "used"), [("exclude", [False, True]), ("include", [True, True])])
def test_a_confidence_equal_to_the_threshold_counts_only_where_ties_are_included(ties, used):
    rows = [[3.0, 3.0], [3.0, 2.0]]
    case = case_of_logits(PseudoLabel(threshold=0.5, ties=ties), [0, 1], labeled=rows, weak=rows)
    assert case.found.pseudo_labels.used.tolist() == used


def test_without_confident_images_the_term_is_zero_and_so_is_its_gradient():
    case = take(PseudoLabel(threshold=1))
    assert case.found.terms["pseudo_label"].item() == 0
    assert_rows(case.gradient("pseudo_label", "weak"), [[0.0] * CLASSES] * UNLABELED)


def test_the_weight_is_1_after_two_fifths_of_the_run():
    weights = [take(PseudoLabel(), number=step, total=100).found.weights["pseudo_label"] for step in (0, 10, 40, 99)]
    assert weights == [0, 0.25, 1, 1]


def test_labels_and_loss_come_from_one_pass_over_the_weak_images():
    assert PseudoLabel().views == VIEWS
    case = take(PseudoLabel())
    assert images_by_network(case.passes) == {"student": [LABELED, UNLABELED], "teacher": []}
    assert len(case.logits("weak")) == UNLABELED


@pytest.mark.parametrize("field", weight_fields(PseudoLabel))
def test_doubling_a_weight_adds_exactly_its_term_to_the_total(field):
    assert_doubling_adds_exactly_its_term(PseudoLabel(threshold=THRESHOLD), field)


def test_a_weight_of_zero_removes_term_and_views():
    method = PseudoLabel(pseudo_label_weight=0)
    assert method.views == VIEWS[:1]
    case = take(method)
    assert list(case.found.terms) == ["supervised"]
    assert images_by_network(case.passes)["student"] == [LABELED]
