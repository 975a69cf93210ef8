"""What a model believes about a run's unlabeled images, and which of them are worth a label."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.analysis.finished_run import open_run
from crmatch.augment.policies import build_policy
from crmatch.augment.weak import weak_views
from crmatch.data.folder.load import load_folder
from crmatch.data.images import ImageSet
from crmatch.data.splits import Split
from crmatch.evaluation import BATCH
from crmatch.predict.model import Model
from crmatch.randomness import generator
from crmatch.runs.experiment import weak_augmentation
from crmatch.spec.recipes import setting_of
from crmatch.spec.run_spec import RunSpec

STRONG_VIEWS = 4
"""Strong views of each image whose mean prediction is compared with that of the weak ones."""
WEAK_VIEWS = 2


class Beliefs(NamedTuple):
    """What a model believes about unlabeled images.

    Attributes:
        rows: int64 (N,), rows of the training set, none of them labeled.
        probabilities: (N, K) of the images themselves.
        disagreement: (N,), total variation between the mean predictions of weak and of strong views, 0..1.
        surprise: (N,), confidence times how much closer, in cosine of features, the nearest labeled image of another class
            is than the nearest one of the predicted class; 0 where it is not.
        features: (N, D), of length 1.
        labeled_features: (L, D) of the labeled images, of length 1.
    """

    rows: Tensor
    probabilities: Tensor
    disagreement: Tensor
    surprise: Tensor
    features: Tensor
    labeled_features: Tensor

    @property
    def uncertainty(self) -> Tensor:
        """(N,) in 0..1: the mean of 1 - (p1 - p2), how close the two best classes are, and of the disagreement."""
        best = self.probabilities.topk(2, dim=1).values
        return (1 - (best[:, 0] - best[:, 1]) + self.disagreement) / 2


class ReviewedRun(NamedTuple):
    """A finished run with its data and what its model believes.

    Attributes:
        spec: of the run.
        model: its model.
        train: its training images.
        split: which of them are labeled.
        names: how labels.csv calls each row of the training set: the path of the picture, or the number of the row.
        beliefs: about the unlabeled ones.
    """

    spec: RunSpec
    model: Model
    train: ImageSet
    split: Split
    names: tuple[str, ...]
    beliefs: Beliefs


class Suggestion(NamedTuple):
    """An image worth labeling, and why."""

    name: str
    row: int
    reason: str


def read_run(run: Path, data_dir: Path | None = None) -> ReviewedRun:
    """A finished run, its data and its model's beliefs."""
    finished = open_run(run, data_dir)
    spec, model, train, split = finished.record.spec, finished.model, finished.data.train, finished.split
    setting = setting_of(spec, data_dir)
    names = tuple(str(row) for row in range(len(train)))
    if setting.folder is not None:
        names = load_folder(setting.folder, spec.data.image_size, data_dir, setting.labels_file).train_paths
    return ReviewedRun(spec, model, train, split, names, score_unlabeled(model, spec, train, split))


def score_unlabeled(model: Model, spec: RunSpec, train: ImageSet, split: Split) -> Beliefs:
    """What `model` believes about the images that have no label; deterministic."""
    free = torch.ones(len(train), dtype=torch.bool)
    free[split.labeled] = False
    rows = free.nonzero().squeeze(1)
    images = train.images[rows]
    probabilities, features = _outputs(model, images)
    weak = strong = torch.zeros_like(probabilities)
    chosen = spec.augmentation
    policy = build_policy("randaugment", chosen.variant, chosen.cutout, chosen.geometry)
    for view in range(max(WEAK_VIEWS, STRONG_VIEWS)):
        views = weak_views(images, weak_augmentation(spec), generator(0, "beliefs/weak", view))
        if view < WEAK_VIEWS:
            weak = weak + _outputs(model, views)[0] / WEAK_VIEWS
        draws = policy.draw(len(views), views.shape[2], views.shape[3], generator(0, "beliefs/strong", view))
        strong = strong + _outputs(model, policy.apply(views, draws))[0] / STRONG_VIEWS
    _, labeled_features = _outputs(model, train.images[split.labeled])
    return Beliefs(
        rows=rows,
        probabilities=probabilities,
        disagreement=(weak - strong).abs().sum(dim=1) / 2,
        surprise=_surprise(probabilities, features, labeled_features, train.labels[split.labeled]),
        features=features,
        labeled_features=labeled_features,
    )


def suggest(run: ReviewedRun, count: int) -> list[Suggestion]:
    """The `count` images most worth a label: uncertain ones, unlike each other and unlike what is labeled.

    One after the other, the image with the largest uncertainty * (1 - cosine to the nearest labeled or chosen image).
    """
    beliefs, found = run.beliefs, []
    uncertainty = beliefs.uncertainty
    nearest = (beliefs.features @ beliefs.labeled_features.T).max(dim=1).values
    chosen = torch.zeros(len(beliefs.rows), dtype=torch.bool)
    for _ in range(min(count, len(beliefs.rows))):
        score = (uncertainty + 1e-6) * (1 - nearest).clamp_min(1e-6)
        place = int(torch.where(chosen, -1.0, score).argmax())
        chosen[place] = True
        row = int(beliefs.rows[place])
        found.append(Suggestion(run.names[row], row, _reason(run, place, float(nearest[place]))))
        nearest = torch.maximum(nearest, beliefs.features @ beliefs.features[place])
    return found


def _reason(run: ReviewedRun, place: int, nearest: float) -> str:
    """Why an image is worth a label, in words."""
    beliefs, names = run.beliefs, run.model.class_names
    (first, second), (one, other) = (part.tolist() for part in beliefs.probabilities[place].topk(2))
    parts = [f"{names[one]} {100 * first:.0f} % or {names[other]} {100 * second:.0f} %"]
    if (apart := float(beliefs.disagreement[place])) > 0.25:
        parts.append(f"weak and strong views disagree by {100 * apart:.0f} %")
    parts.append(f"similarity to the nearest labeled or suggested image {nearest:.2f}")
    return "; ".join(parts)


def _surprise(probabilities: Tensor, features: Tensor, labeled_features: Tensor, labels: Tensor) -> Tensor:
    confidence, predicted = probabilities.max(dim=1)
    cosine = features @ labeled_features.T
    same = labels[None] == predicted[:, None]
    own = cosine.masked_fill(~same, -1).max(dim=1).values
    others = cosine.masked_fill(same, -1).max(dim=1).values
    return confidence * (others - own).clamp_min(0)


@torch.inference_mode()
def _outputs(model: Model, images: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (N, K) and features of length 1 (N, D) of uint8 images at the model's size."""
    parts = [model.network(model.normalizer(part)) for part in torch.split(images, BATCH)]
    logits = torch.cat([part.logits for part in parts])
    features = torch.cat([part.features for part in parts])
    return logits.softmax(dim=1), torch.nn.functional.normalize(features, dim=1)
