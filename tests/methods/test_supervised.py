"""Supervised only: the mean cross-entropy of the labeled images."""

from __future__ import annotations

import pytest
from kit import assert_terms, take

from crmatch.methods import Supervised
from reference import baseline_formulas as reference


@pytest.mark.parametrize("smoothing", [0.0, 0.001, 0.3])
def test_the_loss_equals_the_loop_over_labeled_images(smoothing):
    case = take(Supervised(label_smoothing=smoothing), labeled=6)
    expected = reference.supervised(case.batch.labels.tolist(), case.logits("labeled"), smoothing)
    assert_terms(case, {"supervised": expected}, {"supervised": 1.0})
    assert case.found.pseudo_labels is None
