"""Scores of a run's unlabeled images: how certain its model is of each, and which are most worth a label."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from crmatch.analysis.finished_run import FinishedRun, open_run
from crmatch.data.folder.load import load_folder
from crmatch.randomness import generator
from crmatch.runs.workspace import Workspace

WEAK_VIEWS = 2
STRONG_VIEWS = 4
"""Views of each image; the mean prediction on the strong ones is compared with that on the weak ones."""


class Scores(NamedTuple):
    """What a model predicts for the N images without a label.

    The disagreement, in 0..1, is the total variation distance between the mean predictions on weak and on strong views.
    The surprise is confidence * max(0, c_other - c_own), where c_own and c_other are the cosines between the image's
    features and those of the nearest labeled image of the predicted class and of any other class.
    """

    rows: Tensor  # int64 (N,), rows in the training set
    probabilities: Tensor  # (N, K), of the unaugmented images
    disagreement: Tensor  # (N,)
    surprise: Tensor  # (N,)
    features: Tensor  # (N, D), of length 1
    labeled_features: Tensor  # (L, D) of the labeled images, of length 1

    @property
    def uncertainty(self) -> Tensor:
        """(N,) in 0..1: the mean of 1 - (p1 - p2), with p1 and p2 the two largest probabilities, and of the disagreement."""
        best = self.probabilities.topk(2, dim=1).values
        return (1 - (best[:, 0] - best[:, 1]) + self.disagreement) / 2


class ReviewedRun(NamedTuple):
    """A finished run with the scores of its unlabeled images."""

    run: FinishedRun
    names: tuple[str, ...]  # of all training images in labels.csv: path of the picture, or row in a data set
    scores: Scores


class Suggestion(NamedTuple):
    """An image worth labeling, and the reason."""

    name: str
    row: int
    reason: str


def read_run(path: Path, workspace: Workspace) -> ReviewedRun:
    """The finished run in `path` with the scores of its unlabeled images."""
    run = open_run(path, workspace)
    setting = workspace.setting_of(run.record.spec)
    names = tuple(str(row) for row in range(len(run.data.train)))
    if setting.folder is not None:
        names = load_folder(setting.folder, run.model.image_size, workspace.data_dir, setting.labels_file).train_paths
    return ReviewedRun(run, names, score_unlabeled(run))


def score_unlabeled(run: FinishedRun) -> Scores:
    """Scores of the images without a label. Views are drawn from fixed seeds, so the same run gives the same scores."""
    model, train, labeled = run.model, run.data.train, run.split.labeled
    has_label = torch.zeros(len(train), dtype=torch.bool)
    has_label[labeled] = True
    rows = (~has_label).nonzero().squeeze(1)
    images = train.images[rows]
    probabilities, features = model.outputs(images)
    weak_mean = strong_mean = torch.zeros_like(probabilities)
    for view in range(STRONG_VIEWS):
        weak = run.weak(images, generator(0, "beliefs/weak", view))
        strong = run.strong(images, generator(0, "beliefs/strong", view), weak)
        if view < WEAK_VIEWS:
            weak_mean = weak_mean + model.outputs(weak)[0] / WEAK_VIEWS
        strong_mean = strong_mean + model.outputs(strong)[0] / STRONG_VIEWS
    features, labeled_features = (F.normalize(part, dim=1) for part in (features, model.features(train.images[labeled])))
    confidence, predicted = probabilities.max(dim=1)
    same, cosine = train.labels[labeled][None] == predicted[:, None], features @ labeled_features.T
    own, other = (cosine.masked_fill(excluded, -1).max(dim=1).values for excluded in (~same, same))
    return Scores(
        rows=rows,
        probabilities=probabilities,
        disagreement=(weak_mean - strong_mean).abs().sum(dim=1) / 2,
        surprise=confidence * (other - own).clamp_min(0),
        features=features,
        labeled_features=labeled_features,
    )


def suggest(reviewed: ReviewedRun, count: int) -> list[Suggestion]:
    """The `count` images most worth a label: uncertain ones, unlike each other and unlike the labeled ones.

    Greedy: each time the image with the largest uncertainty * (1 - cosine to the nearest labeled or suggested image).
    """
    scores, found = reviewed.scores, []
    uncertainty = scores.uncertainty
    nearest = (scores.features @ scores.labeled_features.T).max(dim=1).values
    chosen = torch.zeros(len(scores.rows), dtype=torch.bool)
    for _ in range(min(count, len(scores.rows))):
        value = (uncertainty + 1e-6) * (1 - nearest).clamp_min(1e-6)
        place = int(torch.where(chosen, -1.0, value).argmax())
        chosen[place] = True
        row = int(scores.rows[place])
        found.append(Suggestion(reviewed.names[row], row, _reason(reviewed, place, float(nearest[place]))))
        nearest = torch.maximum(nearest, scores.features @ scores.features[place])
    return found


def _reason(reviewed: ReviewedRun, place: int, nearest: float) -> str:
    scores, names = reviewed.scores, reviewed.run.model.class_names
    (first, second), (one, other) = (part.tolist() for part in scores.probabilities[place].topk(2))
    parts = [f"{names[one]} {100 * first:.0f} % or {names[other]} {100 * second:.0f} %"]
    if (disagreement := float(scores.disagreement[place])) > 0.25:
        parts.append(f"weak and strong views disagree by {100 * disagreement:.0f} %")
    parts.append(f"similarity to the nearest labeled or suggested image {nearest:.2f}")
    return "; ".join(parts)
