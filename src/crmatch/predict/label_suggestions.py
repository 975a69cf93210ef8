"""Scores of a run's unlabeled images: how certain its model is of each, and which are most worth a label."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn

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
    count = len(rows) * (1 + WEAK_VIEWS + STRONG_VIEWS) + len(labeled)
    outputs = _view_outputs(run, workspace, count, progress)
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


def _view_outputs(run: FinishedRun, workspace: Workspace, count: int, progress: Progress | None) -> ViewOutputs:
    """The outputs of `count` views; from the features that training has stored, if the backbone was frozen."""
    views = ["none", *(f"weak{view}" for view in range(WEAK_VIEWS)), *(f"strong{view}" for view in range(STRONG_VIEWS))]
    model, bank, done = run.model, dict[str, NDArray[np.float16]](), 0
    config = run.record.spec.network
    if isinstance(config, PretrainedConfig) and config.train == "head":
        store = FeatureStore(run.record.spec, run.data.train.images, workspace.features)
        if not store.missing(view_names(config)):
            views = view_names(config)
            bank = dict(zip(views, store.read(views), strict=True))
            whole = model.network
            head = Network(FeatureInput(cast(Tensor, whole.backbone.center)), whole.classifier, {}, whole.normalize_features)
            model = dataclasses.replace(model, network=head.eval(), normalizer=cast(Normalizer, nn.Identity()))

    def inputs(view: str, rows: Tensor) -> Tensor:
        if bank:
            return torch.from_numpy(bank[view][rows.numpy()]).to(model.network.classifier.weight.dtype)[:, :, None, None]
        images = run.data.train.images[rows]
        if view == "none":
            return images
        weak = run.weak(images, generator(0, "beliefs/weak", int(view[-1])))
        return weak if view.startswith("weak") else run.strong(images, generator(0, "beliefs/strong", int(view[-1])), weak)

    def outputs(kind: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal done
        found = []
        for view in (view for view in views if view.startswith(kind)):
            parts = []
            for block in torch.split(inputs(view, rows), BLOCK):
                parts.append(model.outputs(block))
                done += len(block)
                if progress and not bank:
                    progress(done, count)
            found.append([torch.cat(one) for one in zip(*parts, strict=True)])
        return torch.stack([probabilities for probabilities, _ in found]).mean(dim=0), found[0][1]

    return outputs


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
