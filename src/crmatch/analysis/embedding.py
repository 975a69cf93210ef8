"""t-SNE of the features of unlabeled images, several models side by side (spec 7.6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.analysis.finished_run import FinishedRun, draws, open_run, pooled_features
from crmatch.errors import RequestError, unknown_name_error
from crmatch.methods import METHODS

LIMIT = 2000
"""Images drawn at most: t-SNE takes minutes for more, and points cover each other."""
FEWEST = 10


class Embedding(NamedTuple):
    """Images of several models in the plane.

    Attributes:
        points: one array (N, 2) per model.
        titles: what to call each model.
        labels: (N,), positions in `class_names`, -1 where the class is unknown.
        class_names: the classes shown.
    """

    points: list[NDArray[np.float64]]
    titles: list[str]
    labels: NDArray[np.int64]
    class_names: list[str]


def embed(
    runs: Sequence[Path], classes: Sequence[str] | None = None, *, data_dir: Path | None = None, limit: int = LIMIT
) -> Embedding:
    """Embed the same unlabeled images by every run's model; `classes` restricts them to some classes by name."""
    finished = [open_run(path, data_dir) for path in runs]
    first = finished[0]
    for other in finished[1:]:
        same = first.record.data_fingerprint == other.record.data_fingerprint
        if not same or not torch.equal(first.split.unlabeled, other.split.unlabeled):
            raise RequestError(
                f"{other.path} has other unlabeled images than {first.path}.\nCompare runs of one setting and split."
            )
    names = list(classes or first.record.class_names)
    rows, labels = _choose(first, names, bool(classes), limit)
    if len(rows) < FEWEST:
        raise RequestError(
            f"only {len(rows)} unlabeled images of these classes.\nName more classes; t-SNE needs {FEWEST} images."
        )
    images = first.data.train.images[rows]
    points = [_plane(pooled_features(run.model, images)) for run in finished]
    return Embedding(points, [_title(run) for run in finished], labels, names)


def _choose(run: FinishedRun, names: list[str], chosen: bool, limit: int) -> tuple[Tensor, NDArray[np.int64]]:
    """Rows of unlabeled images of the classes, in a fixed random choice, and their positions in `names`."""
    positions = torch.full((len(run.record.class_names) + 1,), -1)
    for place, name in enumerate(names):
        if name not in run.record.class_names:
            raise unknown_name_error("class", name, run.record.class_names)
        positions[run.record.class_names.index(name)] = place
    rows = run.split.unlabeled
    labels = positions[run.data.train.labels[rows]]  # unknown classes (-1) read the last position, which stays -1
    if chosen:
        rows, labels = rows[labels >= 0], labels[labels >= 0]
    order = torch.randperm(len(rows), generator=draws(0, "embedding"))[:limit].sort().values
    return rows[order], labels[order].numpy()


def _plane(features: Tensor) -> NDArray[np.float64]:
    """t-SNE of (N, D) features, the same for the same features: begun from principal components."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    mapping = TSNE(n_components=2, init="pca", perplexity=perplexity, random_state=0)
    return np.asarray(mapping.fit_transform(features.double().numpy()), dtype=np.float64)


def _title(run: FinishedRun) -> str:
    error = "" if run.record.error is None else f", error {run.record.error:.2f} %"
    return f"{METHODS[run.record.spec.method.name].title}{error}\n{run.path.parent.name}"
