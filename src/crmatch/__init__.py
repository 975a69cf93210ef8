"""crmatch trains image classifiers from a handful of labels and a pile of unlabeled images.

Public names are resolved on first use, so that importing the package does no work.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "CRMatchClassifier": "crmatch.estimator.classifier",
    "LabeledKFold": "crmatch.estimator.selection",
    "Method": "crmatch.methods.base",
    "RunRecord": "crmatch.runs.record",
    "RunSpec": "crmatch.spec.run_spec",
    "labeled_scorer": "crmatch.estimator.selection",
    "load": "crmatch.predict.model",
    "recipe": "crmatch.spec.recipes",
    "records": "crmatch.runs.finished",
    "replace": "crmatch.spec.run_spec",
    "run": "crmatch.runs.run",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
