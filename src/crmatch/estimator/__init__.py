"""CRMatchClassifier, which follows scikit-learn's contract."""

from crmatch.estimator.classifier import CRMatchClassifier

__all__ = ["CRMatchClassifier"]
