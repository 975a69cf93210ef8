"""Pictures of a run for its page: mistakes, doubts and calibration of the evaluated model, from its own data."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from crmatch.analysis.predictions import Bin, Prediction, confident_mistakes, least_certain, reliability
from crmatch.analysis.runs import open_run
from crmatch.report.thumbnails import thumbnail

SHOWN = 24


class Thumbnail(NamedTuple):
    """A picture with its prediction: classes by name, `truth` empty where unknown, confidence as text."""

    address: str
    predicted: str
    second: str
    truth: str
    confidence: str


class ImageViews(NamedTuple):
    """What the page shows of single images.

    Attributes:
        mistakes: the most confident mistakes on the test set.
        uncertain: the least certain images, of the test set or, without one, of the unlabeled images.
        uncertain_source: which of both.
        bins: reliability on the test set.
    """

    mistakes: list[Thumbnail]
    uncertain: list[Thumbnail]
    uncertain_source: str
    bins: list[Bin]


def image_views(path: Path, data_dir: Path | None) -> ImageViews:
    """Predict the run's test images, or its unlabeled ones where there is no test set, and pick what is worth seeing."""
    run = open_run(path, data_dir)
    names = run.model.class_names

    def shown(images: Tensor, predictions: list[Prediction]) -> list[Thumbnail]:
        return [
            Thumbnail(
                thumbnail(images[one.row]),
                names[one.predicted],
                names[one.second],
                names[one.truth] if one.truth >= 0 else "",
                f"{min(100 * one.confidence, 99.9):.1f} %",
            )
            for one in predictions
        ]

    if run.data.test is None:
        images = run.data.train.images[run.split.unlabeled]
        probabilities = run.model.predict_probabilities(images)
        unknown = run.data.train.labels[run.split.unlabeled]
        return ImageViews([], shown(images, least_certain(probabilities, unknown, SHOWN)), "unlabeled", [])
    images, labels = run.data.test.images, run.data.test.labels
    probabilities = run.model.predict_probabilities(images)
    return ImageViews(
        shown(images, confident_mistakes(probabilities, labels, SHOWN)),
        shown(images, least_certain(probabilities, labels, SHOWN)),
        "test",
        reliability(probabilities, labels),
    )
