"""Pseudo-Label: confident predictions are the labels of the very images they were made for."""

from __future__ import annotations

import pytest
import torch
from kit import THRESHOLD, assert_no_gradient, assert_rows, assert_terms, take

from crmatch.methods import PseudoLabel
from reference import baseline_formulas as reference


@pytest.mark.parametrize("ties", ["exclude", "include"])
@pytest.mark.parametrize("changes", [{}, {"pseudo_label_weight": 2.0, "ramp_share": 0.8}], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"labeled": 7, "unlabeled": 5}], ids=["more unlabeled", "more labeled"])
def test_every_term_equals_the_loop_over_images(changes, ties, sizes):
    method = PseudoLabel(threshold=THRESHOLD, ties=ties, **changes)
    case = take(method, number=3, total=10, **sizes)
    value, used = reference.pseudo_label(case.logits("weak"), THRESHOLD, ties)
    assert 0 < sum(used) < len(used)
    terms = {"supervised": reference.supervised(case.batch.labels.tolist(), case.logits("labeled")), "pseudo_label": value}
    ramp = reference.ramp_in_run(3, method.ramp_share * 2**20, 10)
    assert_terms(case, terms, {"supervised": 1.0, "pseudo_label": ramp * method.pseudo_label_weight})
    assert case.found.pseudo_labels.used.tolist() == used
    assert case.found.pseudo_labels.labels.tolist() == torch.tensor(case.logits("weak")).argmax(dim=1).tolist()


def test_the_gradient_reaches_confident_images_only_and_treats_their_label_as_given():
    case = take(PseudoLabel(threshold=THRESHOLD))
    rows = case.logits("weak")
    _, used = reference.pseudo_label(rows, THRESHOLD)
    labels = [reference.one_hot(row.index(max(row)), len(row)) for row in rows]
    assert_rows(case.gradient("pseudo_label", "weak"), reference.cross_entropy_gradient(labels, rows, used))


def test_without_confident_images_the_term_is_zero_and_so_is_its_gradient():
    case = take(PseudoLabel(threshold=1))
    assert case.found.terms["pseudo_label"].item() == 0
    assert_no_gradient(case, "pseudo_label", "weak")
