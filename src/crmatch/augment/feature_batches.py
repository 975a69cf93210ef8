"""Batches of stored features: the views of a method when the backbone is frozen and its features were computed before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.augment.views import Batch, Policy, Source, View
from crmatch.data.splits import batch_positions
from crmatch.randomness import generator

FeatureBank = Sequence[NDArray[np.float16]]
"""Features (N, P) of all images, once per stored view; arrays may be memory-mapped."""
POOL_BLOCK = 4096


@dataclass(frozen=True)
class FeatureBatches:
    """The batch of any step, as `BatchMaker` makes it, but of features (N, P, 1, 1) instead of images.

    An image's weak or strong view is one of its stored views, drawn at random in each step.

    Attributes:
        banks: stored views by augmentation: `none`, `weak`, `strong`.
        labels: int64 (N,); only those of labeled rows are read.
        labeled: rows of the labeled images.
        unlabeled: rows of the unlabeled images.
        views: what the method asks for.
        batch_sizes: images per source.
        policy: the strong policy that the stored views were made with.
        seed: the run's seed.
    """

    banks: Mapping[str, FeatureBank]
    labels: Tensor
    labeled: Tensor
    unlabeled: Tensor
    views: Sequence[View]
    batch_sizes: Mapping[Source, int]
    policy: Policy
    seed: int
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def batch(self, step: int) -> Batch:
        """The batch of `step`."""
        sources: set[Source] = {"unlabeled", *(view.source for view in self.views)}
        positions = {
            source: batch_positions(len(self._pool(source)), self.batch_sizes[source], self.seed, source, step)
            for source in sources
        }
        rows = {source: self._pool(source)[places] for source, places in positions.items()}
        views = {
            view.name: self._features(view.augmentation, rows[view.source], generator(self.seed, f"view/{view.name}", step))
            for view in self.views
        }
        labels = self.labels[rows["labeled"]] if "labeled" in rows else self.labels[:0]
        return Batch(labels.to(self.device), views, positions["unlabeled"].to(self.device))

    def learn(self, step: int, predict: Callable[[Tensor], Tensor]) -> None:
        """Nothing: stored views were drawn before any prediction, so no policy learns."""

    def pool(
        self, source: Literal["labeled", "unlabeled"], augmentation: Literal["none", "weak"] = "none", step: int = 0
    ) -> Iterator[Tensor]:
        """Features of all images of a pool in order, in blocks."""
        for block, rows in enumerate(torch.split(self._pool(source), POOL_BLOCK)):
            yield self._features(augmentation, rows, generator(self.seed, f"pool/{source}/{block}", step))

    def _pool(self, source: Source) -> Tensor:
        return self.labeled if source == "labeled" else self.unlabeled

    def _features(self, augmentation: str, rows: Tensor, randomness: torch.Generator) -> Tensor:
        """One stored view of each row: float32 (N, P, 1, 1)."""
        bank = self.banks[augmentation]
        chosen = torch.randint(len(bank), rows.shape, generator=randomness)
        features = torch.empty(len(rows), bank[0].shape[1])
        for number, view in enumerate(bank):
            here = chosen == number
            features[here] = torch.from_numpy(view[rows[here].numpy()]).float()
        return features.to(self.device, self.dtype)[:, :, None, None]
