"""Scoring and splitting for partly labeled data: scikit-learn's own tools count unlabeled entries of y as a class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import get_scorer
from sklearn.model_selection import StratifiedKFold
from sklearn.utils import _safe_indexing

from crmatch.estimator.inputs import labeled_entries

Rows = NDArray[np.intp]
Scorer = Callable[[Any, Any, Any], float]


def labeled_scorer(scoring: str | Scorer) -> Scorer:
    """The scorer of this name, e.g. `f1_macro`, or a given one, applied to the labeled entries of y only."""
    return partial(_score_labeled, get_scorer(scoring))


def _score_labeled(scorer: Scorer, estimator: Any, X: Any, y: Any) -> float:
    rows, labels = labeled_entries(y)
    return scorer(estimator, _safe_indexing(X, rows), labels)


class LabeledKFold(StratifiedKFold):  # type: ignore[misc]
    """Stratified folds of the labeled entries of y; all unlabeled ones belong to every training part and to no test part.

    Parameters are those of scikit-learn's `StratifiedKFold`.
    """

    def split(self, X: Any, y: Any, groups: Any = None) -> Iterator[tuple[Rows, Rows]]:
        """Rows of the training part and of the test part, for each fold."""
        labeled, labels = labeled_entries(y)
        for _, test in super().split(labeled, labels):
            yield np.delete(np.arange(len(y)), labeled[test]), labeled[test]
