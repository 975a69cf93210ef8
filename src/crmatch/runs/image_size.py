"""The image size for a pretrained backbone: as large as the time allows, unless cross-validation over the labels objects."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from crmatch.augment.batches import Normalizer
from crmatch.data.folder.decode import PictureError, decode_picture
from crmatch.data.folder.scan import scan_folder
from crmatch.data.images import resize
from crmatch.data.settings import Setting
from crmatch.networks.config import PretrainedConfig
from crmatch.networks.pretrained.backbone import root, standardize
from crmatch.networks.pretrained.inference import feature_function
from crmatch.networks.pretrained.load import load_body
from crmatch.runs.cost import pretrained_seconds
from crmatch.runs.cross_validation import folds, standard_error
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec, replace

SIZES = (96, 128, 160, 192, 224)
MOST_ENLARGED = 4
"""Pictures are not enlarged more than this: eurosat_small, of 32 pixels, was worse at 160 and 224 pixels than at 96 and 128."""
MOST_LABELS = 500
"""Labeled images that are compared at every size."""


class SizeChoice(NamedTuple):
    """The chosen image size, and the cross-validation error in percent at every size that was tried (if there were several)."""

    size: int
    errors: dict[int, float]

    @property
    def reason(self) -> str:
        """Why this size, in parentheses; empty if there was no choice."""
        tried = ", ".join(f"{error:.0f} % error at {size}" for size, error in self.errors.items())
        return f" (cross-validation over the labels: {tried})" if tried else ""


def choose_image_size(spec: RunSpec, setting: Setting, workspace: Workspace, seconds: float) -> SizeChoice:
    """The largest size at which the run takes at most `seconds`, unless the labels speak against it.

    Pictures are enlarged at most fourfold, but to 96 pixels at least. A size is dropped if its cross-validation error is more
    than one standard error above the lowest.
    """
    images, labels, total = _labeled_in_folder(setting) if setting.folder else _labeled_in_set(spec, setting, workspace)
    useful = [size for size in SIZES if size <= MOST_ENLARGED * setting.image_size]
    fits = [size for size in useful if _seconds(spec, size, total) <= seconds] or [SIZES[0]]
    held_out = folds(labels, spec.seed)
    if len(fits) == 1 or not held_out:
        return SizeChoice(fits[-1], {})
    assert isinstance(spec.network, PretrainedConfig)
    body = load_body(spec.network.backbone).module
    errors = {size: _held_out_error(spec, body, resize(images, size), labels, held_out) for size in fits}
    return SizeChoice(largest_without_loss(errors, len(labels)), errors)


def largest_without_loss(errors: dict[int, float], labels: int) -> int:
    """The largest size whose error (percent) is at most one standard error, or one label if that is more, above the lowest."""
    lowest = min(errors.values())
    limit = lowest + standard_error(lowest, labels)
    return max(size for size, error in errors.items() if error <= limit + 1e-9)


def _seconds(spec: RunSpec, size: int, images: int) -> float:
    return pretrained_seconds(replace(spec, **{"data.image_size": size}), images)


def _labeled_in_folder(setting: Setting) -> tuple[Tensor, Tensor, int]:
    """Labeled pictures of a folder at the largest size, uint8 (N, C, H, W), their labels, and the number of all pictures."""
    assert setting.folder is not None
    index = scan_folder(setting.folder, setting.labels_file)
    images, labels = [], []
    for row in _thinned(np.flatnonzero(index.roles == "labeled").tolist()):
        with contextlib.suppress(PictureError):
            images.append(decode_picture(index.folder / index.paths[row], SIZES[-1], setting.channels))
            labels.append(int(index.labels[row]))
    pixels = np.stack(images) if images else np.empty((0, SIZES[-1], SIZES[-1], setting.channels), np.uint8)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.tensor(labels), index.training


def _labeled_in_set(spec: RunSpec, setting: Setting, workspace: Workspace) -> tuple[Tensor, Tensor, int]:
    """The same of a data set, at its own size."""
    data, split = workspace.load(replace(spec, **{"data.image_size": setting.image_size}))
    rows = _thinned(split.labeled.tolist())
    return data.train.images[rows], data.train.labels[rows], len(data.train)


def _thinned(rows: list[int]) -> list[int]:
    return rows[:: -(-len(rows) // MOST_LABELS)] if rows else rows


def _held_out_error(spec: RunSpec, body: nn.Module, images: Tensor, labels: Tensor, held_out: list[Tensor]) -> float:
    """Cross-validation error in percent of a logistic regression on the features of unaugmented images."""
    from sklearn.linear_model import LogisticRegression

    device = torch.device("cpu")
    compute = feature_function(body, images.shape[2], device, by_onnx=False).compute
    normalize = Normalizer(list(spec.data.mean), list(spec.data.std), torch.float32, device)
    features = torch.cat([compute(normalize(block)) for block in torch.split(images, 64)])
    x, y = standardize(features, root(features).mean(dim=0)).numpy(), labels.numpy()
    wrong = held = 0
    for mask in (mask.numpy() for mask in held_out):
        model = LogisticRegression(max_iter=1000).fit(x[~mask], y[~mask])
        wrong, held = wrong + int((model.predict(x[mask]) != y[mask]).sum()), held + int(mask.sum())
    return 100 * wrong / held
