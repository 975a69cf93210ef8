"""run(spec) -> RunRecord: the only place that wires data, method, training and files together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from torch import Tensor

import crmatch
from crmatch.atomic_files import checksum
from crmatch.augment.batches import BatchMaker, Normalizer
from crmatch.augment.policies import build_policy
from crmatch.augment.views import Batch
from crmatch.augment.weak import WeakAugmentation
from crmatch.data.folder.load import load_folder
from crmatch.data.images import DataSet
from crmatch.data.load import add_labels, load_data
from crmatch.data.settings import Setting
from crmatch.data.splits import Split, given_split, make_split
from crmatch.errors import RequestError
from crmatch.evaluation import Quality, measure, predict_probabilities, pseudo_label_counts, pseudo_label_quality
from crmatch.methods.base import LossTerms, Models
from crmatch.networks.build import build_network
from crmatch.networks.network import Network
from crmatch.spec.run_spec import RunSpec
from crmatch.training.health import CollapseWatch
from crmatch.training.loop import Curves, Observers, Training
from crmatch.training.runtime import Runtime

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """Who watches a run."""

    def start(self, done: int, total: int) -> None:
        """Training begins, or continues after `done` steps."""

    def advance(self, done: int) -> None:
        """One more step is done."""

    def log(self, line: Curves) -> None:
        """A new line of curves."""


class Experiment:
    """A spec with its data, ready to train; holds no file."""

    def __init__(self, spec: RunSpec, data: DataSet, split: Split, runtime: Runtime) -> None:
        self.spec, self.data, self.split, self.runtime = spec, data, split, runtime
        channels = data.train.images.shape[1]
        repeats = [channels if len(values) == 1 else 1 for values in (spec.data.mean, spec.data.std)]
        self.mean, self.std = list(spec.data.mean) * repeats[0], list(spec.data.std) * repeats[1]
        if len(self.mean) != channels or len(self.std) != channels:
            raise RequestError(
                f"data.mean and data.std have {len(self.mean)} and {len(self.std)} values for {channels} channels.\n"
                f"Give one value, or {channels}."
            )
        self.normalizer = Normalizer(self.mean, self.std, runtime.dtype, runtime.device)
        self._test = (data.test.images.to(runtime.device), data.test.labels.to(runtime.device)) if data.test else None
        self._collapse = CollapseWatch(data.train.class_names, spec.plan.total_steps(len(split.unlabeled)), runtime.device)
        self._truth = data.train.labels[self.split.unlabeled].to(runtime.device)

    def batches(self) -> BatchMaker:
        """The maker of the run's batches."""
        spec, device = self.spec, self.runtime.device
        chosen = spec.augmentation
        return BatchMaker(
            images=self.data.train.images.to(device),
            labels=self.data.train.labels.to(device),
            labeled=self.split.labeled.to(device),
            unlabeled=self.split.unlabeled.to(device),
            views=spec.method.views,
            batch_sizes={
                "labeled": spec.plan.labeled_batch_size,
                "unlabeled": spec.plan.unlabeled_batch_size,
                "extra": spec.method.extra_batch_size,
            },
            weak=weak_augmentation(spec),
            policy=build_policy(chosen.policy, chosen.variant, chosen.cutout, chosen.geometry),
            normalizer=self.normalizer,
            seed=spec.seed,
            processes=self.runtime.processes,
        )

    def training(self) -> Training:
        """The run at its beginning."""
        spec, unlabeled = self.spec, len(self.split.unlabeled)
        network = build_network(
            spec.network,
            channels=self.data.train.images.shape[1],
            image_size=spec.data.image_size,
            classes=self.data.train.classes,
            unlabeled=unlabeled,
            heads=spec.method.heads,
            seed=spec.seed,
        )
        return Training(
            method=spec.method,
            network=network,
            batches=self.batches(),
            plan=spec.plan,
            total_steps=spec.plan.total_steps(unlabeled),
            steps_per_epoch=spec.plan.steps_per_epoch(unlabeled),
            runtime=self.runtime,
            seed=spec.seed,
        )

    def observe(self, batch: Batch, loss: LossTerms) -> dict[str, Tensor]:
        """Counts behind the pseudo-label curves; the true classes are looked up here and nowhere else."""
        if loss.pseudo_labels is None:
            return {}
        self._collapse.add(*loss.pseudo_labels)
        return pseudo_label_counts(*loss.pseudo_labels, self._truth[batch.unlabeled])

    def evaluate(self, models: Models) -> dict[str, float]:
        """Test error of the moving average and of the raw weights, where there is a test set."""
        qualities = {"ema": self.measure(models.teacher), "raw": self.measure(models.student)}
        return {f"error/{name}": quality.error for name, quality in qualities.items() if quality}

    def measure(self, network: Network) -> Quality | None:
        """Everything measured of `network` on the test set; None where there is none."""
        if self._test is None:
            return None
        images, labels = self._test
        return measure(predict_probabilities(network, images, self.normalizer), labels)

    def evaluated(self, models: Models) -> Network:
        """The model that counts."""
        return models.teacher if self.spec.method.evaluated == "ema" else models.student

    def observers(self, log: Callable[[Curves], None], **others: Any) -> Observers:
        """Observers that evaluate on the test set and hand finished lines of curves to `log`."""

        def finish(line: Curves) -> None:
            if "count/used" in line:
                line |= pseudo_label_quality(line)
                self._collapse.check(line)
            log({key: value for key, value in line.items() if not key.startswith("count/")})

        return Observers(log=finish, evaluate=self.evaluate, observe=self.observe, **others)

    def deployed(self, models: Models, error: float | None = None) -> tuple[bytes, dict[str, Any]]:
        """What prediction needs: the content of `model.safetensors` and of `config.json`."""
        spec, train_set, test = self.spec, self.data.train, self.data.test
        network = self.evaluated(models)
        weights = safetensors.torch.save(network.deployed_state())
        config = {
            "format": 1,
            "network": spec.network.model_dump(mode="json"),
            "refiner": network.refiner_description(),
            "channels": train_set.images.shape[1],
            "image_size": spec.data.image_size,
            "mean": self.mean,
            "std": self.std,
            "class_names": list(train_set.class_names),
            "weights": spec.method.evaluated,
            "method": spec.method.name,
            "setting": spec.setting,
            "test_error": error,
            "test_images": len(test) if test else 0,
            "crmatch_version": crmatch.__version__,
            "checksum": checksum(weights),
        }
        return weights, config


def weak_augmentation(spec: RunSpec) -> WeakAugmentation:
    """What the weak views of a run are made of."""
    chosen = spec.augmentation
    return WeakAugmentation(spec.padding, chosen.mirror, chosen.padding_mode, chosen.rotation, chosen.jitter)


def load_run_data(spec: RunSpec, setting: Setting, data_dir: Path | None = None) -> tuple[DataSet, Split]:
    """The images of a run and which of them are labeled: by the setting's rule, or as the folder has them."""
    if setting.folder is None:
        data = load_data(setting.data, data_dir, spec.data.image_size)
        rule, unlabeled = spec.data.split_rule, spec.data.unlabeled
        split = make_split(data, setting.labels_per_class, spec.split, rule, unlabeled)
        return add_labels(data, split, setting.labels_file) if setting.labels_file else (data, split)
    pictures = load_folder(setting.folder, spec.data.image_size, data_dir, setting.labels_file)
    split = given_split(pictures.train.labels, spec.data.unlabeled)
    if not len(split.unlabeled):
        raise RequestError(
            f"{setting.folder} has no unlabeled pictures.\n"
            "Put some into unlabeled/, or use the labeled ones as such: --set data.unlabeled=all"
        )
    return DataSet(pictures.train, pictures.test), split
