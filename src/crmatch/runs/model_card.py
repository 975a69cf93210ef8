"""The model card: what a trained model is, on which data it was trained, and how good it is. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crmatch.methods import METHODS
from crmatch.runs.record import HEADLINES, RunRecord

MOST_CLASSES = 50
"""Classes beyond this number are counted, not listed."""


def model_card(record: RunRecord, config: Mapping[str, Any]) -> str:
    """`README.md` of a run's directory, from its record and from the `config.json` beside it."""
    spec, method = record.spec, METHODS[record.spec.method.name]
    size, kind = config["image_size"], "gray" if config["channels"] == 1 else "RGB"
    average = "exponential moving average of the weights" if record.evaluated == "ema" else "final weights"
    lines = [
        f"# {method.title} on {_plain(spec.setting)}",
        "",
        f"An image classifier for {len(record.class_names)} classes, trained by crmatch {record.crmatch_version}.",
        "",
        "| | |",
        "|---|---|",
        f"| input | {kind} images, {size}x{size} pixels, uint8; normalization is part of `config.json` |",
        f"| data | {_plain(spec.setting)}: {record.labeled_images:,} labeled, {record.unlabeled_images:,} unlabeled images |",
        f"| method | {method.title} ({method.paper}), recipe {spec.recipe}, {record.steps:,} steps, seed {spec.seed} |",
        f"| weights | {average} |",
        f"| test error | {_quality(record)} |",
        f"| data fingerprint | {record.data_fingerprint} |",
        "",
        "## Classes",
        "",
        *_classes(record),
        "",
        "## Use",
        "",
        "```python",
        "import crmatch",
        "model = crmatch.load(DIRECTORY)  # this one",
        "probabilities = model.predict_probabilities(images)  # uint8 (N, C, H, W)",
        "```",
        "",
        "Prediction needs `model.safetensors` and `config.json`. On the command line: `crmatch predict DIRECTORY PICTURES...`.",
        "",
    ]
    return "\n".join(lines)


def _quality(record: RunRecord) -> str:
    if record.error is None:
        return "not measured: there was no test set"
    return f"{record.error:.2f} % on n = {record.test_images:,} test images ({HEADLINES[record.spec.headline]})"


def _classes(record: RunRecord) -> list[str]:
    errors = record.per_class_error or [None] * len(record.class_names)
    named = list(zip(record.class_names, errors, strict=True))
    lines = [
        f"- {_plain(name)}" + (f": test error {error:.2f} %" if error is not None else "")
        for name, error in named[:MOST_CLASSES]
    ]
    return lines + ([f"- and {len(named) - MOST_CLASSES:,} more"] if len(named) > MOST_CLASSES else [])


def _plain(name: str) -> str:
    """A name as one line of Markdown that means nothing but itself."""
    line = " ".join(name.split())
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>()#+!|" else letter for letter in line)
