"""t-SNE of the features of unlabeled images, for several models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.analysis.finished_run import FinishedRun, draws, open_run
from crmatch.errors import RequestError, unknown_name_error
from crmatch.methods import title_of
from crmatch.runs.finished import short_names
from crmatch.runs.workspace import Workspace

LIMIT = 2000
"""Default number of images: t-SNE takes minutes for more, and the points would cover each other."""
FEWEST = 10


class Embedding(NamedTuple):
    """The features of N images in the plane, for several models."""

    points: list[NDArray[np.float64]]  # one array (N, 2) per model
    titles: list[str]  # one per model
    labels: NDArray[np.int64]  # (N,), positions in `class_names`, -1 for unknown classes
    class_names: list[str]


def embed(runs: Sequence[Path], workspace: Workspace, classes: Sequence[str] | None = None, *, limit: int = LIMIT) -> Embedding:
    """Embed the same unlabeled images with the model of every run; `classes` restricts them to these classes."""
    first, *others = finished = [open_run(path, workspace) for path in runs]
    for other in others:
        same = first.record.data_fingerprint == other.record.data_fingerprint
        if not same or not torch.equal(first.split.unlabeled, other.split.unlabeled):
            found = f"{other.path} has other unlabeled images than {first.path}"
            raise RequestError(f"{found}.\nCompare runs of one setting and split.")
    rows, labels = _choose(first, classes, limit)
    if len(rows) < FEWEST:
        found = f"only {len(rows)} unlabeled images of these classes"
        raise RequestError(f"{found}.\nName more classes; t-SNE needs {FEWEST} images.")
    images = first.data.train.images[rows]
    points = [_plane(run.model.features(images)) for run in finished]
    names = short_names([run.path for run in finished])
    titles = [_title(run, names[run.path]) for run in finished]
    return Embedding(points, titles, labels, list(classes or first.record.class_names))


def _choose(run: FinishedRun, classes: Sequence[str] | None, limit: int) -> tuple[Tensor, NDArray[np.int64]]:
    """Rows of at most `limit` unlabeled images, a fixed random choice, and the positions of their classes."""
    known = run.record.class_names
    positions = torch.full((len(known) + 1,), -1)
    for place, name in enumerate(classes or known):
        if name not in known:
            raise unknown_name_error("class", name, known)
        positions[known.index(name)] = place
    rows = run.split.unlabeled
    labels = positions[run.data.train.labels[rows]]  # an unknown class (-1) reads the last position, which stays -1
    if classes:
        rows, labels = rows[labels >= 0], labels[labels >= 0]
    order = torch.randperm(len(rows), generator=draws(0, "embedding"))[:limit].sort().values
    return rows[order], labels[order].numpy()


def _plane(features: Tensor) -> NDArray[np.float64]:
    """t-SNE of (N, D) features; it starts from the principal components and a fixed seed, so it is deterministic."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    mapping = TSNE(n_components=2, init="pca", perplexity=perplexity, random_state=0)
    return np.asarray(mapping.fit_transform(features.double().numpy()), dtype=np.float64)


def _title(run: FinishedRun, name: str) -> str:
    error = "" if run.record.error is None else f", error {run.record.error:.2f} %"
    return f"{title_of(run.record.spec.method)}{error}\n{name}"
