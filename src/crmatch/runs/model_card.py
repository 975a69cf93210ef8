"""The model card: what was trained, on which data, and its test error. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crmatch.methods import paper_of, title_of
from crmatch.networks.config import NetworkConfig, PretrainedConfig
from crmatch.runs.record import HEADLINES, RunRecord, describe_error

if TYPE_CHECKING:
    from crmatch.runs.calibration import Calibration

MOST_CLASSES = 50  # further classes are only counted
CARD = """# {title} on {setting}

An image classifier for {classes} classes, trained by crmatch {record.crmatch_version}.

| | |
|---|---|
| input | {kind} images, {size}x{size} pixels, uint8; normalization is part of `config.json` |
| data | {setting}: {record.labeled_images:,} labeled, {record.unlabeled_images:,} unlabeled images |
| method | {title} ({paper}), recipe {spec.recipe}, {record.steps:,} steps, seed {spec.seed} |
| network | {network} |
| weights | {weights} |
| test error | {error} |
| confidences | {confidences} |
| data fingerprint | {record.data_fingerprint} |

## Classes

{class_list}

## Use

```python
import crmatch
model = crmatch.load(DIRECTORY)  # the directory of this file
predictions = model.predict(images)  # arrays, PIL images or paths -> class names and confidences
```

Prediction needs `model.safetensors` and `config.json`. On the command line: `crmatch predict DIRECTORY PICTURES...`.
"""


def model_card(record: RunRecord, config: Mapping[str, Any], calibration: Calibration | None = None) -> str:
    """`README.md` of a run's directory, from its record and its `config.json`."""
    spec = record.spec
    error, estimate = record.error, record.cross_validation
    tested = "not measured: there was no test set"
    if error is not None:
        images = f"n = {record.test_images:,} test images ({HEADLINES[spec.headline]})"
        tested = f"{describe_error(error, record.test_images)}, on {images}"
    elif estimate:
        guess = describe_error(estimate.error, estimate.labels)
        tested = f"not measured; estimated {guess}, by cross-validation over n = {estimate.labels:,} labels"
    errors = record.per_class_error or [None] * len(record.class_names)
    lines = [
        f"- {_plain(name)}" if error is None else f"- {_plain(name)}: test error {error:.2f} %"
        for name, error in zip(record.class_names, errors, strict=True)
    ]
    more = len(lines) - MOST_CLASSES
    return CARD.format(
        record=record,
        spec=spec,
        title=title_of(spec.method),
        paper=paper_of(spec.method),
        setting=_plain(spec.setting),
        classes=len(lines),
        kind="gray" if config["channels"] == 1 else "RGB",
        size=config["image_size"],
        network=_network(spec.network),
        weights="exponential moving average of the weights" if record.evaluated == "ema" else "final weights",
        error=tested,
        confidences=calibration.describe_temperature() if calibration else "not calibrated: no labels were held out",
        class_list="\n".join(lines[:MOST_CLASSES] + ([f"- and {more:,} more"] if more > 0 else [])),
    )


def _network(network: NetworkConfig) -> str:
    if not isinstance(network, PretrainedConfig):
        return str(network.kind)
    trained = "frozen, with a trained classifier" if network.train == "head" else "trained further"
    return f"{_plain(network.backbone)}, pretrained (weights {network.weights}), {trained}"


def _plain(name: str) -> str:
    """A name as one line of text without Markdown in it."""
    line = " ".join(name.split())
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>()#+!|" else letter for letter in line)
