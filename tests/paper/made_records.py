"""A record that no run made, to be changed by tests."""

from __future__ import annotations

from crmatch.runs.record import Errors, RunRecord
from crmatch.spec.recipes import recipe

TEMPLATE = RunRecord(
    spec=recipe("digits@4"),
    numerics=1,
    crmatch_version="0.1.0",
    evaluated="ema",
    ema=Errors(last=3.8, median_last_20=4.0, best_on_test=3.6),
    raw=Errors(last=4.2, median_last_20=4.4, best_on_test=4.0),
    per_class_error=[0.0, 7.6],
    confusion=[[250, 0], [19, 231]],
    calibration_error=1.0,
    class_names=["0", "1"],
    labeled_images=40,
    unlabeled_images=1257,
    test_images=500,
    data_fingerprint="0123456789abcdef",
    steps=1000,
    images_seen=288_000,
    seconds=100.0,
    machine={},
    final={"step": 1000, "pseudo_label_error": 3.0, "contributing_error": 1.0, "mask_rate": 95.0},
)
