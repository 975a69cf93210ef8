"""A finished run with its model and images, and the features its analyses look at."""

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
from crmatch.experiment import load_run_data, weak_augmentation
from crmatch.inference import Model, load
from crmatch.randomness import generator
from crmatch.recipes import setting_of
from crmatch.results import RunRecord


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


def open_run(path: Path | str, data_dir: Path | None = None) -> FinishedRun:
    """The finished run in `path` with its model and its data, which must be those it was trained on."""
    path = Path(path)
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
