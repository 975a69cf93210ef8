"""What a model says about single images: its most confident mistakes, where it is least certain, calibration.

A finished run with its model and images, and the features its analyses look at.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.analysis.curves import read_record
from crmatch.augment.ctaugment import CTAugment
from crmatch.augment.policies import Policy, build_policy
from crmatch.augment.weak import weak_views
from crmatch.data.images import DataSet, ImageSet
from crmatch.data.splits import Split
from crmatch.errors import DataError
from crmatch.evaluation import BATCH
from crmatch.predict.model import Model, load
from crmatch.randomness import generator
from crmatch.runs.experiment import load_run_data, weak_augmentation
from crmatch.runs.record import RunRecord
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import setting_of

BINS = 15
"""Equal bins of confidence, as in the calibration error."""


class Prediction(NamedTuple):
    """One image's prediction.

    Attributes:
        row: which image.
        predicted: its most probable class.
        second: the next one.
        confidence: probability of the most probable class, 0..1.
        truth: its true class; -1 where unknown.
    """

    row: int
    predicted: int
    second: int
    confidence: float
    truth: int


class Bin(NamedTuple):
    """Images whose confidence lies in low..high: their number, mean confidence and share of right predictions (0 if none)."""

    low: float
    high: float
    images: int
    confidence: float
    accuracy: float


def confident_mistakes(probabilities: Tensor, labels: Tensor, count: int) -> list[Prediction]:
    """Up to `count` wrongly classified images of (N, K) probabilities, the most confident first."""
    confidence, predicted = probabilities.max(dim=1)
    wrong = ((predicted != labels) & (labels >= 0)).nonzero().squeeze(1)
    order = confidence[wrong].argsort(descending=True, stable=True)[:count]
    return _predictions(probabilities, labels, wrong[order])


def least_certain(probabilities: Tensor, labels: Tensor, count: int) -> list[Prediction]:
    """Up to `count` images of (N, K) probabilities, those of the lowest confidence first."""
    return _predictions(probabilities, labels, probabilities.amax(dim=1).argsort(stable=True)[:count])


def reliability(probabilities: Tensor, labels: Tensor) -> list[Bin]:
    """Confidence against accuracy in equal bins: sum_b (n_b / N) |accuracy_b - confidence_b| is the calibration error."""
    confidence, predicted = probabilities.double().max(dim=1)
    which = (probabilities.amax(dim=1) * BINS).long().clamp_max(BINS - 1)
    images = torch.bincount(which, minlength=BINS)
    zeros = torch.zeros(BINS, dtype=torch.float64)
    sums = (zeros.index_add(0, which, confidence), zeros.index_add(0, which, (predicted == labels).double()))
    means = [(total / images.clamp_min(1)).tolist() for total in sums]
    rows = zip(images.tolist(), *means, strict=True)
    return [Bin(place / BINS, (place + 1) / BINS, *row) for place, row in enumerate(rows)]


def _predictions(probabilities: Tensor, labels: Tensor, rows: Tensor) -> list[Prediction]:
    confidence, classes = probabilities[rows].topk(2, dim=1)
    columns = (rows, classes[:, 0], classes[:, 1], confidence[:, 0], labels[rows])
    return [Prediction(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


class FinishedRun(NamedTuple):
    """Everything an analysis may need.

    Attributes:
        path: the run's directory.
        record: its record.
        model: the evaluated model.
        data: its images.
        split: which of the training images are labeled and unlabeled.
    """

    path: Path
    record: RunRecord
    model: Model
    data: DataSet
    split: Split

    @property
    def test(self) -> ImageSet:
        """The test set; raises where there is none."""
        if self.data.test is None:
            raise DataError(f"the data of {self.path} has no test set.\nThis command needs one.")
        return self.data.test

    def weak(self, images: Tensor, randomness: torch.Generator) -> Tensor:
        """Weak views of uint8 (N, C, H, W) as in the run's training."""
        return weak_views(images, weak_augmentation(self.record.spec), randomness)

    def strong(self, images: Tensor, randomness: torch.Generator) -> Tensor:
        """Strong views as in the run's training: the policy applied to a weak view of its own."""
        policy = self.policy()
        draws = policy.draw(len(images), images.shape[2], images.shape[3], randomness)
        return policy.apply(self.weak(images, randomness), draws)

    def policy(self) -> Policy:
        """The run's strong policy, with what it learned."""
        chosen = self.record.spec.augmentation
        policy = build_policy(chosen.policy, chosen.variant, chosen.cutout, chosen.geometry)
        if isinstance(policy, CTAugment) and self.record.policy is not None:
            rates = policy.state()["rates"]
            for row, parameters in enumerate(self.record.policy.values()):
                for parameter, values in enumerate(parameters):
                    rates[row, parameter, : len(values)] = torch.tensor(values, dtype=rates.dtype)
            policy.load_state({"rates": rates})
        return policy


def open_run(path: Path | str, workspace: Workspace | Path | None = None) -> FinishedRun:
    """The finished run in `path` with its model and its data, which must be those it was trained on."""
    path, data_dir = Path(path), workspace.data_dir if isinstance(workspace, Workspace) else workspace
    model, record = load(path), read_record(path)
    data, split = load_run_data(record.spec, setting_of(record.spec, data_dir), data_dir)
    if data.train.fingerprint != record.data_fingerprint or list(data.train.class_names) != record.class_names:
        raise DataError(f"the data of {path} changed since it was trained.\nBring the old data back, or train again.")
    return FinishedRun(path, record, model, data, split)


@torch.inference_mode()
def pooled_features(model: Model, images: Tensor) -> Tensor:
    """Features at point (b), after pooling: uint8 (N, C, H, W) of the model's size -> (N, D)."""
    parts = [model.network(model.normalizer(part)).features for part in torch.split(images, BATCH)]
    return torch.cat(parts)


def draws(repeat: int, purpose: str, epoch: int = 0) -> torch.Generator:
    """Randomness of an analysis: the same for every run, so that runs are compared on equal draws."""
    return generator(repeat, f"analysis/{purpose}", epoch)
