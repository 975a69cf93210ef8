"""CRMatchClassifier, which follows scikit-learn's contract, and scoring and folds that leave out unlabeled entries."""

from crmatch.estimator.classifier import CRMatchClassifier
from crmatch.estimator.selection import LabeledKFold, labeled_scorer

__all__ = ["CRMatchClassifier", "LabeledKFold", "labeled_scorer"]
