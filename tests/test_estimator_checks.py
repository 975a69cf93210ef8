"""scikit-learn's own checks on the estimator, with a tiny network and 30 steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sklearn.utils.estimator_checks import parametrize_with_checks

from crmatch.estimator import EXPECTED_FAILED_CHECKS, CRMatchClassifier

TINY = {
    "network.filters": 4, "network.scales": 1, "plan.labeled_batch_size": 16, "plan.unlabeled_batch_size": 16,
    "plan.evaluate_every": 30, "plan.log_every": 30, "plan.checkpoint_every": 30, "precision": "fp64",
}  # fmt: skip


def tiny(**changes: Any) -> CRMatchClassifier:
    return CRMatchClassifier(steps=30, options={**TINY, **changes}, device="cpu")


@parametrize_with_checks([tiny()], expected_failed_checks=lambda estimator: EXPECTED_FAILED_CHECKS, xfail_strict=True)
def test_scikit_learns_checks_pass(estimator: CRMatchClassifier, check: Callable[[CRMatchClassifier], None]) -> None:
    check(estimator)
