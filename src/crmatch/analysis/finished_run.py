"""A finished run with its model and its images, as the analyses need it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.atomic_files import read_json
from crmatch.augment.batches import build_policy
from crmatch.augment.ctaugment import CTAugment
from crmatch.augment.views import Policy
from crmatch.augment.weak import weak_views
from crmatch.data.folder.load import FolderData, load_folder
from crmatch.data.images import LEFT_OUT, UNLABELED, DataSet, ImageSet
from crmatch.data.splits import Split, given_split
from crmatch.errors import DataError
from crmatch.predict.model import Model, load
from crmatch.randomness import generator
from crmatch.runs.directory import RunDirectory
from crmatch.runs.experiment import weak_augmentation
from crmatch.runs.finished import read_record
from crmatch.runs.record import RunRecord
from crmatch.runs.workspace import Workspace


class FinishedRun(NamedTuple):
    """A finished run."""

    path: Path  # its directory
    record: RunRecord
    model: Model  # the evaluated one
    data: DataSet
    split: Split  # which training images are labeled and which are unlabeled
    pictures: FolderData | None = None  # of a run on a folder

    @property
    def test(self) -> ImageSet:
        """The test set; a `DataError` if there is none."""
        if self.data.test is None:
            raise DataError(f"the data of {self.path} has no test set.\nThis command needs one.")
        return self.data.test

    def weak(self, images: Tensor, randomness: torch.Generator) -> Tensor:
        """Weak views of uint8 images (N, C, H, W), as in the run's training."""
        return weak_views(images, weak_augmentation(self.record.spec), randomness)

    def strong(self, images: Tensor, randomness: torch.Generator, weak: Tensor | None = None) -> Tensor:
        """Strong views, as in the run's training: its policy applied to the `weak` views, by default to new ones."""
        policy = self.policy()
        draws = policy.draw(len(images), images.shape[2], images.shape[3], randomness)
        return policy.apply(self.weak(images, randomness) if weak is None else weak, draws)

    def policy(self) -> Policy:
        """The run's strong augmentation policy; CTAugment with the rates it had learned at the end of training."""
        chosen = self.record.spec.augmentation
        policy = build_policy(chosen.policy, chosen.variant, chosen.cutout, chosen.geometry, chosen.translation)
        if isinstance(policy, CTAugment) and self.record.policy is not None:
            rates = policy.state()["rates"]
            for row, parameters in enumerate(self.record.policy.values()):
                for parameter, values in enumerate(parameters):
                    rates[row, parameter, : len(values)] = torch.tensor(values, dtype=rates.dtype)
            policy.load_state({"rates": rates})
        return policy


def open_run(path: Path | str, workspace: Workspace) -> FinishedRun:
    """The finished run in `path` with its model and its data, which must still be the data it was trained on.

    A folder's labels.csv may have changed: the run keeps the labels that it was trained with.
    """
    path = Path(path)
    model, record = load(path), read_record(path)
    pictures = None
    if record.spec.data.folder and RunDirectory(path).split.is_file():
        pictures = load_folder(Path(record.spec.data.folder), model.image_size, workspace.data_dir, trainable=False)
        data, split = _as_trained(pictures, record, RunDirectory(path))
    else:
        data, split = workspace.load(record.spec)
    if data.train.fingerprint != record.data_fingerprint or list(data.train.class_names) != record.class_names:
        raise DataError(f"the data of {path} changed since it was trained.\nRestore the old data, or train again.")
    return FinishedRun(path, record, model, data, split, pictures)


def _as_trained(pictures: FolderData, record: RunRecord, directory: RunDirectory) -> tuple[DataSet, Split]:
    """The pictures of a folder with the labels that a run was trained with."""
    kept, names = read_json(directory.split), tuple(record.class_names)
    labels, left_out = torch.full((len(pictures.train),), UNLABELED), kept.get("left_out", [])
    if max([*kept["labeled"], *left_out], default=-1) < len(labels):  # otherwise the fingerprint will differ
        labels[kept["labeled"]] = torch.arange(len(names)).repeat_interleave(torch.tensor(kept["labels_of_class"]))
        labels[left_out] = LEFT_OUT
    test = pictures.test
    if test is not None:
        place = torch.tensor([names.index(name) if name in names else UNLABELED for name in test.class_names])
        if (place[test.labels] == UNLABELED).any():
            raise DataError(f"there are test pictures of classes that {directory.path} does not know.\nTrain again.")
        test = ImageSet(test.images, place[test.labels], names)
    return DataSet(ImageSet(pictures.train.images, labels, names), test), given_split(labels, record.spec.data.unlabeled)


def draws(repeat: int, purpose: str, epoch: int = 0) -> torch.Generator:
    """The random generator of an analysis; it does not depend on the run, so runs are compared on equal draws."""
    return generator(repeat, f"analysis/{purpose}", epoch)
