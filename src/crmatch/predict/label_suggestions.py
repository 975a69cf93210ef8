"""Scores of a run's unlabeled images: how certain its model is of each, and which are most worth a label."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from crmatch.analysis.finished_run import FinishedRun, open_run
from crmatch.augment.batches import Normalizer
from crmatch.data.folder.labels_file import read_labels
from crmatch.data.folder.load import load_folder
from crmatch.data.folder.scan import LABELS_FILE
from crmatch.data.folder.workers import Progress
from crmatch.data.images import LEFT_OUT, DataSet
from crmatch.data.splits import given_split
from crmatch.errors import DataError, RequestError
from crmatch.networks.config import PretrainedConfig
from crmatch.networks.network import Network
from crmatch.networks.pretrained.backbone import FeatureInput
from crmatch.predict.model import load
from crmatch.randomness import generator
from crmatch.runs.features import FeatureStore, view_names
from crmatch.runs.finished import read_record
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec

WEAK_VIEWS = 2
STRONG_VIEWS = 4
"""Views of each image; the mean prediction on the strong ones is compared with that on the weak ones."""
BLOCK = 128
"""Images between two calls of a progress bar."""


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
    lines: Mapping[str, str] = MappingProxyType({})  # of the labels file: name -> class, empty if unsure, or -


class Suggestion(NamedTuple):
    """An image worth labeling, and the reason."""

    name: str
    row: int
    reason: str


def read_run(path: Path, workspace: Workspace, progress: Progress | None = None) -> ReviewedRun:
    """The finished run in `path` with the scores of the images that are unlabeled now."""
    spec = read_record(path).spec
    folder, file = spec.data.folder, labels_file(spec)
    if folder is None:
        run = open_run(path, workspace)
        names = tuple(str(row) for row in range(len(run.data.train)))
    else:
        model = load(path)
        given = Path(spec.data.labels_file) if spec.data.labels_file else None
        pictures = load_folder(Path(folder), model.image_size, workspace.data_dir, given, trainable=False)
        if pictures.train.images.shape[1] != model.channels:
            raise DataError(f"{folder} has color pictures now, and the model in {path} takes gray ones.\nTrain again.")
        split, names = given_split(pictures.train.labels, "remaining"), pictures.train_paths
        run = FinishedRun(path, read_record(path), model, DataSet(pictures.train, pictures.test), split, pictures)
    if not len(run.split.unlabeled) or not len(run.split.labeled):
        missing = "labeled" if len(run.split.unlabeled) else "unlabeled"
        raise RequestError(f"there are no {missing} images in {folder or spec.setting}.\nNothing can be suggested.")
    lines = read_labels(file, Path(folder or "/"), names) if file else {}
    return ReviewedRun(run, names, score_unlabeled(run, workspace, progress), lines)


def labels_file(spec: RunSpec) -> Path | None:
    """The file with the labels of a run: the one that was given, or the folder's own, which may not exist."""
    own = Path(spec.data.folder) / LABELS_FILE if spec.data.folder else None
    return Path(spec.data.labels_file) if spec.data.labels_file else own


def score_unlabeled(run: FinishedRun, workspace: Workspace, progress: Progress | None = None) -> Scores:
    """Scores of the images without a label. Views are drawn from fixed seeds, so the same run gives the same scores."""
    train, labeled, names = run.data.train, run.split.labeled, run.model.class_names
    has_label = train.labels == LEFT_OUT
    has_label[labeled] = True
    rows = (~has_label).nonzero().squeeze(1)
    outputs = _stored_outputs(run, workspace) or _computed_outputs(run, rows, progress)
    probabilities, features = outputs("none", rows)
    weak, strong = (outputs(kind, rows)[0] for kind in ("weak", "strong"))
    features, labeled_features = (F.normalize(part, dim=1) for part in (features, outputs("none", labeled)[1]))
    # The model may not know the newest classes.
    place = torch.tensor([names.index(name) if name in names else -1 for name in train.class_names])
    confidence, predicted = probabilities.max(dim=1)
    same, cosine = place[train.labels[labeled]][None] == predicted[:, None], features @ labeled_features.T
    own, other = (cosine.masked_fill(excluded, -1).max(dim=1).values for excluded in (~same, same))
    return Scores(
        rows=rows,
        probabilities=probabilities,
        disagreement=(weak - strong).abs().sum(dim=1) / 2,
        surprise=confidence * (other - own).clamp_min(0),
        features=features,
        labeled_features=labeled_features,
    )


ViewOutputs = Callable[[str, Tensor], tuple[Tensor, Tensor]]
"""(`none`, `weak` or `strong`, rows) -> mean probabilities over the views of that kind, and features."""


def _computed_outputs(run: FinishedRun, rows: Tensor, progress: Progress | None) -> ViewOutputs:
    done, total = 0, len(rows) * (1 + WEAK_VIEWS + STRONG_VIEWS) + len(run.split.labeled)

    def of_images(images: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal done
        parts = []
        for block in torch.split(images, BLOCK):
            parts.append(run.model.outputs(block))
            done += len(block)
            if progress:
                progress(done, total)
        probabilities, features = zip(*parts, strict=True)
        return torch.cat(probabilities), torch.cat(features)

    def outputs(kind: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        images = run.data.train.images[rows]
        if kind == "none":
            return of_images(images)
        views = []
        for number in range(WEAK_VIEWS if kind == "weak" else STRONG_VIEWS):
            weak = run.weak(images, generator(0, "beliefs/weak", number))
            view = weak if kind == "weak" else run.strong(images, generator(0, "beliefs/strong", number), weak)
            views.append(of_images(view))
        return _mean(views)

    return outputs


def _mean(views: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([probabilities for probabilities, _ in views]).mean(dim=0), views[0][1]


def _stored_outputs(run: FinishedRun, workspace: Workspace) -> ViewOutputs | None:
    """Outputs from the features that training stored; None if the backbone was trained or the pictures are not the same."""
    spec, network = run.record.spec, run.model.network
    if not isinstance(spec.network, PretrainedConfig) or spec.network.train != "head":
        return None
    views = view_names(spec.network)
    store = FeatureStore(spec, run.data.train.images, workspace.features)
    if store.missing(views):
        return None
    bank = dict(zip(views, store.read(views), strict=True))
    center = cast(Tensor, network.backbone.center)
    head = Network(FeatureInput(center), network.classifier, {}, network.normalize_features).eval()
    model = dataclasses.replace(run.model, network=head, normalizer=_Unchanged())

    def outputs(kind: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        chosen = [torch.from_numpy(bank[view][rows.numpy()]) for view in views if view.startswith(kind)]
        return _mean([model.outputs(features.to(center.dtype)[:, :, None, None]) for features in chosen])

    return outputs


class _Unchanged(Normalizer):
    """Stored features are the head's input as they are."""

    def __init__(self) -> None: ...

    def __call__(self, images: Tensor) -> Tensor:
        return images


def suggest(reviewed: ReviewedRun, count: int) -> list[Suggestion]:
    """The `count` images most worth a label: uncertain ones, unlike each other and unlike the labeled ones.

    Greedy: each time the image with the largest uncertainty * (1 - cosine to the nearest labeled or suggested image).
    """
    scores, found = reviewed.scores, []
    uncertainty = scores.uncertainty
    nearest = (scores.features @ scores.labeled_features.T).max(dim=1).values
    # Nobody is asked twice about a picture whose class was not clear.
    chosen = torch.tensor([reviewed.lines.get(reviewed.names[row]) == "" for row in scores.rows.tolist()])
    for _ in range(min(count, int((~chosen).sum()))):
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
