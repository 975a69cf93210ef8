"""Batches: (seed, step) in, the normalized views that a method asks for out. Only a learning policy has state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from crmatch.augment.ctaugment import CTAugment, Translation
from crmatch.augment.randaugment import RandAugment
from crmatch.augment.views import NO_FIRST_STAGE, Batch, FirstStage, Policy, Source, View
from crmatch.augment.weak import WeakAugmentation, rows_of, weak_views
from crmatch.data.splits import batch_positions
from crmatch.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from crmatch.randomness import generator


class Normalizer:
    """(pixel / 255 - mean) / std per channel; with mean = std = 0.5 this is pixel / 127.5 - 1, in [-1, 1]."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        memory_format: torch.memory_format = torch.channels_last,
        size: int | None = None,
    ) -> None:
        """Compute scale and shift; `mean` and `std` have one entry per channel, for pixels scaled to 0..1.

        Convolutions of torch are faster in channels_last memory; onnxruntime takes contiguous_format. With `size`, images are
        then reduced to that side (bilinear, antialiased).
        """
        scale = [1 / (255 * deviation) for deviation in std]
        shift = [average / deviation for average, deviation in zip(mean, std, strict=True)]
        self.device, self._memory_format, self._size = torch.device(device), memory_format, size  # of normalized images
        self._scale, self._shift = torch.tensor([scale, shift], dtype=dtype, device=device)[:, :, None, None]

    def __call__(self, images: Tensor) -> Tensor:
        """Convert uint8 (N, C, H, W) to floats on `device`."""
        pixels = images.to(self.device).to(dtype=self._scale.dtype, memory_format=self._memory_format)
        normalized = pixels.mul_(self._scale).sub_(self._shift)
        if self._size is None:
            return normalized
        smaller = F.interpolate(normalized, size=(self._size, self._size), mode="bilinear", antialias=True)
        return smaller.contiguous(memory_format=self._memory_format)


def build_policy(name: str, variant: str, cutout: bool, geometry: bool, translation: Translation = "side") -> Policy:
    """The strong policy `randaugment` in one of its variants, or `ctaugment`.

    `cutout` ends each view with CutOut; without `geometry` no operation is drawn that moves pixels; `translation` is the unit
    of CTAugment's translations.
    """
    if name == "ctaugment":
        return CTAugment(final_cutout=cutout, geometry=geometry, translation=translation)
    return RandAugment(variant, final_cutout=cutout, geometry=geometry)


POOL_BLOCK = 512
"""Images per block of `BatchMaker.pool`."""


@dataclass(frozen=True)
class BatchMaker:
    """Makes the batch of any step, in any order.

    Distributed: every rank draws for the whole batch, renders its own rows and all-gathers the others as bytes, so that a batch
    does not depend on the number of processes.
    """

    images: Tensor  # uint8 (N, C, H, W), the whole training set; augmented where it is, then moved to the normalizer's device
    labels: Tensor  # int64 (N,); only those of labeled rows are read
    labeled: Tensor  # rows of the labeled images
    unlabeled: Tensor  # rows of the unlabeled images
    views: Sequence[View]  # what the method asks for
    batch_sizes: dict[Source, int]  # images per source
    weak: WeakAugmentation
    policy: Policy
    normalizer: Normalizer  # from pixels to floats
    seed: int
    first_stage: FirstStage = NO_FIRST_STAGE  # the steps that have labeled images only
    processes: ProcessGroup = SINGLE_PROCESS  # the ranks that render the views
    start_normalizer: Normalizer | None = None  # of the first `start_steps` steps, whose images are smaller
    start_steps: int = 0

    def normalizer_at(self, step: int) -> Normalizer:
        """The normalizer of `step`, which also sets the size of the images."""
        return self.start_normalizer if self.start_normalizer and step < self.start_steps else self.normalizer

    def batch(self, step: int) -> Batch:
        """Make the batch of `step`."""
        wanted = [view for view in self.views if view.source == "labeled" or step >= self.first_stage.steps]
        positions = {source: self._positions(source, step) for source in ("unlabeled", *(view.source for view in wanted))}
        rows = {source: self._pool(source)[places] for source, places in positions.items()}
        normalizer = self.normalizer_at(step)
        views = {view.name: normalizer(self._augmented(view, rows[view.source], step)) for view in wanted}
        labels = self.labels[rows["labeled"]] if "labeled" in rows else self.labels[:0]
        return Batch(labels.to(self.normalizer.device), views, positions["unlabeled"].to(self.normalizer.device))

    def learn(self, step: int, predict: Callable[[Tensor], Tensor]) -> None:
        """Update a learning policy with probes of the step's weakly augmented labeled images.

        The proximity of an image is 1 - 0.5 * |probabilities - onehot|_1, which is the probability of its class.
        `predict` maps normalized images to class probabilities (N, K) of the evaluated model in eval mode.
        """
        if not isinstance(self.policy, CTAugment):
            return
        rows = self.labeled[self._positions("labeled", step)]
        own = self.processes.local_rows(len(rows))
        weak = self._weak(View("labeled", "labeled", "weak"), rows, step, own)
        height, width = weak.shape[2:]
        draws = self.policy.draw(len(rows), height, width, generator(self.seed, "probe", step), probe=True)
        probes = self.processes.all_gather_rows(self.policy.apply(weak, rows_of(draws, own)), len(rows))
        probabilities = predict(self.normalizer_at(step)(probes))
        proximity = probabilities.cpu().gather(1, self.labels[rows].cpu()[:, None]).squeeze(1)
        self.policy.learn(draws, proximity)

    def pool(
        self, source: Literal["labeled", "unlabeled"], augmentation: Literal["none", "weak"] = "none", step: int = 0
    ) -> Iterator[Tensor]:
        """Yield all images of a pool in order, normalized, in blocks; each block draws its own weak views for `step`."""
        for block, rows in enumerate(torch.split(self._pool(source), POOL_BLOCK)):
            view = View(f"pool/{source}/{block}", source, augmentation)
            yield self.normalizer_at(step)(self._augmented(view, rows, step))

    def _pool(self, source: Source) -> Tensor:
        return self.labeled if source == "labeled" else self.unlabeled

    def _positions(self, source: Source, step: int) -> Tensor:
        """Positions of the step's images in the pool of `source`, int64."""
        in_first_stage = source == "labeled" and step < self.first_stage.steps
        size = self.first_stage.batch_size if in_first_stage else self.batch_sizes[source]
        return batch_positions(len(self._pool(source)), size, self.seed, source, step).to(self.images.device)

    def _augmented(self, view: View, rows: Tensor, step: int) -> Tensor:
        if view.augmentation == "none":
            return self.images.index_select(0, rows)
        own = self.processes.local_rows(len(rows))
        strong_only = view.augmentation == "strong_only"
        views = self.images.index_select(0, rows[own]) if strong_only else self._weak(view, rows, step, own)
        if view.augmentation != "weak":
            height, width = views.shape[2:]
            draws = self.policy.draw(len(rows), height, width, generator(self.seed, f"strong/{view.name}", step))
            views = self.policy.apply(views, rows_of(draws, own))
        return self.processes.all_gather_rows(views, len(rows))

    def _weak(self, view: View, rows: Tensor, step: int, own: slice) -> Tensor:
        randomness = generator(self.seed, f"weak/{view.name}", step)
        return weak_views(self.images.index_select(0, rows), self.weak, randomness, own)
