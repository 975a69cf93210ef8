"""The head stage of a pretrained backbone: compute the features of all views once, then train a classifier on them."""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.atomic_files import write_file
from crmatch.augment.batches import Normalizer, build_policy
from crmatch.augment.feature_batches import FeatureBank, FeatureBatches
from crmatch.augment.weak import weak_views
from crmatch.data.folder.cache import remove_unused
from crmatch.data.images import DataSet
from crmatch.data.settings import GENERIC, Setting
from crmatch.data.splits import Split
from crmatch.errors import RequestError
from crmatch.evaluation import finite
from crmatch.methods.base import Models
from crmatch.networks.build import assemble
from crmatch.networks.config import PretrainedConfig
from crmatch.networks.network import Network
from crmatch.networks.pretrained.backbone import FeatureInput, PretrainedBackbone, root
from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE
from crmatch.networks.pretrained.inference import PooledFeatures, feature_function
from crmatch.networks.pretrained.load import load_body
from crmatch.randomness import generator
from crmatch.runs.experiment import Experiment, weak_augmentation
from crmatch.spec.recipes import head_of
from crmatch.spec.run_spec import RunSpec
from crmatch.training.loop import Observers, Training, train
from crmatch.training.runtime import Runtime

BLOCK = 256
"""Images that go through the backbone together."""
FORMAT = 1
"""Raised when stored features of earlier versions must not be used any more."""
FeatureProgress = Callable[[int, int], None]
"""Receives the number of finished views and the number of all views, summed over images."""


def view_names(config: PretrainedConfig) -> list[str]:
    """The stored views of each training image: the image itself, some weak and some strong views."""
    weak = [f"weak{number}" for number in range(config.weak_views)]
    return ["none", *weak, *(f"strong{number}" for number in range(config.strong_views))]


class FeatureStore:
    """Features of images under several views, on disk: one file of half-precision numbers (N, P) per view.

    The directory's name is a checksum of the images, the backbone and the augmentation, so that the same features are computed
    only once. Views that were finished before a kill are not computed again.
    """

    def __init__(self, spec: RunSpec, images: Tensor, folder: Path) -> None:
        assert isinstance(spec.network, PretrainedConfig)
        self._spec, self._images = spec, images
        about = {
            "format": FORMAT,
            "backbone": [spec.network.backbone, spec.network.weights],
            "normalization": [spec.data.mean, spec.data.std],
            "augmentation": spec.augmentation.model_dump(mode="json"),
            "shape": list(images.shape),
        }
        digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8)
        for block in torch.split(images, BLOCK):
            digest.update(block.contiguous().numpy().tobytes())
        self.folder = folder / digest.hexdigest()

    def missing(self, views: list[str]) -> list[str]:
        """The views that have to be computed."""
        return [view for view in views if not self._is_stored(view)]

    def _is_stored(self, view: str) -> bool:
        """Whether the features of all images are there; a damaged file is computed again."""
        try:
            stored = np.load(self._path(view), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return False
        return stored.dtype == np.float16 and stored.ndim == 2 and len(stored) == len(self._images)

    def compute(
        self, view: str, features: PooledFeatures, normalize: Normalizer, device: torch.device, advance: Callable[[int], None]
    ) -> None:
        """Compute and store one view of all images."""

        def compute_block(number: int, images: Tensor) -> Tensor:
            return features.compute(normalize(self._augmented(view, images, number).to(device))).cpu().half()

        blocks, threads = list[Tensor](), ThreadPoolExecutor(features.calls)
        try:
            for block in threads.map(compute_block, itertools.count(), torch.split(self._images, BLOCK)):
                blocks.append(block)
                advance(len(block))
        finally:
            threads.shutdown(cancel_futures=True)  # if the run is stopped
        content = io.BytesIO()
        np.save(content, torch.cat(blocks).numpy())
        write_file(self._path(view), content.getvalue())

    def read(self, views: list[str]) -> FeatureBank:
        """Stored views, memory-mapped."""
        os.utime(self.folder)  # used now, see `remove_unused`
        return [np.load(self._path(view), mmap_mode="r") for view in views]

    def _path(self, view: str) -> Path:
        return self.folder / f"{view}.npy"

    def _augmented(self, view: str, images: Tensor, block: int) -> Tensor:
        """The view of a block of uint8 images. Its draws depend on the view and the block only, not on the run's seed."""
        if view == "none":
            return images
        images = weak_views(images, weak_augmentation(self._spec), generator(0, f"features/weak/{view}", block))
        if view.startswith("strong"):
            chosen = self._spec.augmentation
            policy = build_policy("randaugment", chosen.variant, chosen.cutout, chosen.geometry)
            height, width = images.shape[2:]
            draws = policy.draw(len(images), height, width, generator(0, f"features/strong/{view}", block))
            images = policy.apply(images, draws)
        return images


class HeadExperiment(Experiment):
    """An experiment whose backbone is frozen: views are stored features, and only a linear classifier is trained.

    Methods, loop, EMA and checkpoints are those of every run. The deployed model is the whole network.
    """

    def __init__(
        self,
        spec: RunSpec,
        data: DataSet,
        split: Split,
        runtime: Runtime,
        folder: Path,
        progress: FeatureProgress | None = None,
    ) -> None:
        super().__init__(spec, data, split, runtime)
        assert isinstance(spec.network, PretrainedConfig)
        self._config = spec.network
        if spec.augmentation.policy != "randaugment":
            raise RequestError("CTAugment learns while the network trains, and here it is frozen.\nUse --policy randaugment.")
        if spec.method.extra_images(1, 1):
            raise RequestError(
                "the rotation term trains the network, which is frozen here.\nUse method.rotation_weight=0, or --recipe tune."
            )
        views = view_names(spec.network)
        train, test = FeatureStore(spec, data.train.images, folder), None
        work = [(train, view, len(data.train)) for view in train.missing(views)]
        if data.test:
            test = FeatureStore(spec, data.test.images, folder)
            work += [(test, view, len(data.test)) for view in test.missing(["none"])]
        self._compute(work, progress)
        remove_unused(folder, [store.folder for store in (train, test) if store])
        banks = dict(zip(views, train.read(views), strict=True))
        self.banks = {
            kind: [bank for view, bank in banks.items() if view.startswith(kind)] for kind in ("none", "weak", "strong")
        }
        self.center = root(torch.from_numpy(self.banks["none"][0].astype(np.float32))).mean(dim=0)
        self._test_features = self._as_input(test.read(["none"])[0]) if test else None

    def _as_input(self, features: NDArray[np.float16]) -> Tensor:
        """Stored features as the input of a head: (N, P, 1, 1)."""
        return torch.from_numpy(features.astype(np.float32)).to(self.runtime.device, self.runtime.dtype)[:, :, None, None]

    def with_split(self, spec: RunSpec, split: Split) -> HeadExperiment:
        """The same features with other labels and another spec; nothing is measured on the test set."""
        other = copy.copy(self)
        other.spec, other.split = spec, split
        other._total_steps = spec.plan.total_steps(len(split.unlabeled))
        return other

    def predict(self, network: Network, rows: Tensor, steps: int | None = None) -> Tensor:
        """Class probabilities (N, K) of training images by the trained head, from their unaugmented views."""
        return self._probabilities(network, self._as_input(self.banks["none"][0][rows.numpy()]))

    @torch.inference_mode()
    def _probabilities(self, network: Network, features: Tensor) -> Tensor:
        was_training = network.training
        probabilities: Tensor = network.eval()(features).logits.softmax(dim=1)
        network.train(was_training)
        return probabilities.cpu()

    def _compute(self, work: list[tuple[FeatureStore, str, int]], progress: FeatureProgress | None) -> None:
        if not work:
            return
        done, total = 0, sum(count for _, _, count in work)
        if progress:
            progress(done, total)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress:
                progress(done, total)

        body = load_body(self._config.backbone).module
        by_onnx = self._config.backbone in EFFICIENTNET_LITE  # other networks may have no ONNX export
        features = feature_function(body, self.spec.data.image_size, self.runtime.device, by_onnx)
        # In float32, whatever the head's precision is.
        normalizer = Normalizer(self.mean, self.std, torch.float32, self.runtime.device, torch.contiguous_format)
        for store, view, _ in work:
            store.compute(view, features, normalizer, self.runtime.device, advance)

    def training(self) -> Training:
        """The training of the classifier, before its first step."""
        spec, unlabeled = self.spec, len(self.split.unlabeled)
        network = assemble(
            FeatureInput(self.center),
            self._config,
            channels=len(self.center),
            image_size=1,
            classes=self.data.train.classes,
            unlabeled=unlabeled,
            heads=spec.method.heads,
            seed=spec.seed,
        )
        epoch = spec.plan.steps_per_epoch(unlabeled)
        return Training(spec.method, network, self._batches(), spec.plan, self._total_steps, epoch, self.runtime, spec.seed)

    def _batches(self) -> FeatureBatches:
        plan, chosen = self.spec.plan, self.spec.augmentation
        return FeatureBatches(
            banks=self.banks,
            labels=self.data.train.labels,
            labeled=self.labeled_rows(),
            unlabeled=self.split.unlabeled,
            device=self.runtime.device,
            dtype=self.runtime.dtype,
            views=self.spec.method.views,
            batch_sizes={"labeled": plan.labeled_batch_size, "unlabeled": plan.unlabeled_batch_size, "extra": 0},
            policy=build_policy("randaugment", chosen.variant, chosen.cutout, chosen.geometry),
            seed=self.spec.seed,
        )

    def test_predictions(self, network: Network, steps: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Probabilities (N, K) and true classes (N,) of the test images; None without a test set."""
        if self._test_features is None or self.data.test is None:
            return None
        return finite(self._probabilities(network, self._test_features)), self.data.test.labels

    def deployed_network(self, models: Models) -> Network:
        """The pretrained backbone with the trained classifier."""
        spec, head = self.spec, self.evaluated(models)
        backbone = PretrainedBackbone(load_body(self._config.backbone), self._config, spec.data.image_size)
        backbone.center.copy_(self.center)
        return Network(backbone, head.classifier, {}, self._config.normalize_features)


def experiment_from_backbone(experiment: Experiment, folder: Path, progress: FeatureProgress | None = None) -> Experiment:
    """The experiment of a pretrained spec without any run on disk: its head, or the network that starts from a trained head."""
    spec, data, split, runtime = experiment.spec, experiment.data, experiment.split, experiment.runtime
    assert isinstance(spec.network, PretrainedConfig)
    if spec.network.train == "head":
        return HeadExperiment(spec, data, split, runtime, folder, progress)
    setting = Setting(spec.setting, 0, spec.data.image_size, data.train.images.shape[1], GENERIC)
    head = HeadExperiment(head_of(spec, setting), data, split, runtime, folder, progress)
    training = head.training()
    train(training, Observers())
    return Experiment(spec, data, split, runtime, head.deployed_network(training.models).state_dict())
