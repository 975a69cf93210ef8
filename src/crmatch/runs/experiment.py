"""An `Experiment` makes a `Training`, its observers and the deployed model from a spec and its data. It writes no file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
from torch import Tensor

import crmatch
from crmatch.atomic_files import checksum
from crmatch.augment.batches import BatchMaker, Normalizer, build_policy
from crmatch.augment.feature_batches import FeatureBatches
from crmatch.augment.views import Batch
from crmatch.augment.weak import WeakAugmentation
from crmatch.data.folder.load import load_folder
from crmatch.data.images import DataSet
from crmatch.data.load import add_labels, load_data
from crmatch.data.settings import Setting
from crmatch.data.splits import Split, balanced, given_split, make_split
from crmatch.errors import DataError, RequestError
from crmatch.evaluation import Quality, finite, measure, predict_probabilities, pseudo_label_counts, pseudo_label_quality
from crmatch.methods.base import LossTerms, Models
from crmatch.networks.build import build_network
from crmatch.networks.network import Network
from crmatch.spec.run_spec import RunSpec
from crmatch.training.health import CollapseWatch
from crmatch.training.loop import LogLine, Observers, Training
from crmatch.training.runtime import Runtime

PREPARING_IMAGES = 2000
"""At most so many training images, without labels, are given to a backbone with a method `prepare` before the first step."""

WATCHED_IMAGES = 50
"""At most so many unlabeled images are predicted at every log point, to notice a model that predicts one class."""


class Progress(Protocol):
    """Follows a run while it trains."""

    def start(self, done: int, total: int) -> None:
        """Training starts, or resumes after `done` of `total` steps."""

    def features(self, done: int, total: int) -> None:
        """The features of `done` of `total` views are computed; only for a frozen backbone, before training starts."""

    def advance(self, done: int) -> None:
        """`done` steps are completed."""

    def log(self, line: LogLine) -> None:
        """There is a new line of curves."""


def load_run_data(spec: RunSpec, setting: Setting, data_dir: Path | None = None) -> tuple[DataSet, Split]:
    """The images of a run and which of them are labeled: by the setting's rule, or as given by the folder."""
    if setting.folder is None:
        data = load_data(setting.data, data_dir, spec.data.image_size, setting.code)
        split = make_split(data, setting.labels_per_class, spec.split, spec.data.split_rule, spec.data.unlabeled)
        return add_labels(data, split, setting.labels_file) if setting.labels_file else (data, split)
    pictures = load_folder(setting.folder, spec.data.image_size, data_dir, setting.labels_file)
    split = given_split(pictures.train.labels, spec.data.unlabeled)
    if not len(split.unlabeled):  # then the labeled ones are used as unlabeled ones, too
        split = given_split(pictures.train.labels, "all")
    return DataSet(pictures.train, pictures.test), split


def weak_augmentation(spec: RunSpec) -> WeakAugmentation:
    """The weak augmentation of a run."""
    chosen = spec.augmentation
    return WeakAugmentation(spec.padding, chosen.mirror, chosen.padding_mode, chosen.rotation, chosen.jitter)


def load_initial(network: Network, weights: Mapping[str, Tensor]) -> None:
    """Load the weights to start from: the whole backbone, maybe the classifier. Heads of training keep their own weights."""
    try:
        missing, unexpected = network.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # other shapes
        raise DataError("the weights to start from do not fit the network.\nTrain without --from.") from error
    if unexpected or any(name.startswith("backbone.") for name in missing):
        raise DataError("the weights to start from are not those of this network.\nTrain without --from.")


class Experiment:
    """A spec with its data on a device, ready to train."""

    def __init__(
        self, spec: RunSpec, data: DataSet, split: Split, runtime: Runtime, initial: Mapping[str, Tensor] | None = None
    ) -> None:
        """`initial` are weights of backbone and classifier to start from, instead of random or pretrained ones."""
        self.spec, self.data, self.split, self.runtime = spec, data, split, runtime
        self._initial = initial
        channels = data.train.images.shape[1]
        # One value serves all channels.
        self.mean, self.std = (
            list(values) * (channels if len(values) == 1 else 1) for values in (spec.data.mean, spec.data.std)
        )
        if len(self.mean) != channels or len(self.std) != channels:
            found = f"data.mean and data.std have {len(self.mean)} and {len(self.std)} values for {channels} channels"
            raise RequestError(f"{found}.\nGive one value, or {channels}.")
        self.normalizer = Normalizer(self.mean, self.std, runtime.dtype, runtime.device)
        size = spec.plan.start_size
        self._start_normalizer = Normalizer(self.mean, self.std, runtime.dtype, runtime.device, size=size) if size else None
        self._test = (data.test.images.to(runtime.data_device), data.test.labels) if data.test else None
        self._true_classes = data.train.labels[split.unlabeled].to(runtime.device)
        stage = spec.method.first_stage(len(split.labeled))
        self._total_steps = spec.plan.total_steps(len(split.unlabeled), stage.steps)
        self._first_stage = stage._replace(steps=min(stage.steps, self._total_steps // 2))
        self._collapse = CollapseWatch(data.train.class_names, self._total_steps)

    def training(self) -> Training:
        """The run before its first step."""
        spec, train_set, unlabeled = self.spec, self.data.train, len(self.split.unlabeled)
        shape: dict[str, Any] = {
            "channels": train_set.images.shape[1],
            "image_size": spec.data.image_size,
            "classes": train_set.classes,
        }
        network = build_network(spec.network, **shape, unlabeled=unlabeled, heads=spec.method.heads, seed=spec.seed)
        if self._initial is not None:
            load_initial(network, self._initial)
        elif prepare := getattr(network.backbone, "prepare", None):
            prepare(self.normalizer(train_set.images[:: -(-len(train_set) // PREPARING_IMAGES)]).cpu())
        epoch, first = spec.plan.steps_per_epoch(unlabeled), self._first_stage.steps
        batches, total = self._batches(), self._total_steps
        return Training(spec.method, network, batches, spec.plan, total, epoch, self.runtime, spec.seed, first)

    def labeled_rows(self) -> Tensor:
        """The training images that labeled batches are drawn from; with `data.balance`, some of them several times."""
        labeled = self.split.labeled
        return balanced(labeled, self.data.train.labels) if self.spec.data.balance else labeled

    def _batches(self) -> BatchMaker | FeatureBatches:
        spec, device, plan, strong = self.spec, self.runtime.data_device, self.spec.plan, self.spec.augmentation
        labeled, unlabeled, extra = plan.labeled_batch_size, plan.unlabeled_batch_size, spec.method.extra_batch_size
        return BatchMaker(
            images=self.data.train.images.to(device),
            labels=self.data.train.labels.to(device),
            labeled=self.labeled_rows().to(device),
            unlabeled=self.split.unlabeled.to(device),
            views=spec.method.views,
            batch_sizes={"labeled": labeled, "unlabeled": unlabeled, "extra": extra},
            weak=weak_augmentation(spec),
            policy=build_policy(strong.policy, strong.variant, strong.cutout, strong.geometry, strong.translation),
            normalizer=self.normalizer,
            seed=spec.seed,
            first_stage=self._first_stage,
            processes=self.runtime.processes,
            start_normalizer=self._start_normalizer,
            start_steps=plan.start_steps(self._total_steps),
        )

    def observers(self, log: Callable[[LogLine], None], **others: Any) -> Observers:
        """Observers that evaluate on the test set, measure pseudo-labels and pass each line of curves to `log`."""

        def finish(line: LogLine) -> None:
            if "count/used" in line:
                line |= pseudo_label_quality(line)
                self._collapse.check_use(line["step"], line["mask_rate"])
            log({key: value for key, value in line.items() if not key.startswith("count/")})

        def check(step: int, models: Models) -> None:
            unlabeled = self.split.unlabeled
            sample = unlabeled[:: -(-len(unlabeled) // WATCHED_IMAGES)]
            self._collapse.check_predictions(step, lambda: self.predict(models.student, sample, step).argmax(dim=1))

        return Observers(log=finish, evaluate=self._evaluate, observe=self._observe, check=check, **others)

    def _observe(self, batch: Batch, loss: LossTerms) -> dict[str, Tensor]:
        """Counts behind the pseudo-label curves. The true classes of unlabeled images are used here and nowhere else."""
        if loss.pseudo_labels is None:
            return {}
        return pseudo_label_counts(*loss.pseudo_labels, self._true_classes[batch.unlabeled])

    def _evaluate(self, step: int, models: Models) -> dict[str, float]:
        """Test errors of the EMA weights and of the raw weights; empty without a test set."""
        qualities = {"ema": self.measure(models.teacher, step), "raw": self.measure(models.student, step)}
        return {f"error/{name}": quality.error for name, quality in qualities.items() if quality}

    def _normalizer_after(self, steps: int | None) -> Normalizer:
        """The normalizer of the last of `steps` steps: a network recognizes images of the size on which it was trained last."""
        starts = steps is not None and steps <= self.spec.plan.start_steps(self._total_steps)
        return self._start_normalizer if starts and self._start_normalizer else self.normalizer

    def predict(self, network: Network, rows: Tensor, steps: int | None = None) -> Tensor:
        """Class probabilities (N, K) of training images, unaugmented, after so many steps; None: all."""
        images = self.data.train.images[rows].to(self.runtime.data_device)
        return predict_probabilities(network, images, self._normalizer_after(steps)).cpu()

    def measure(self, network: Network, steps: int | None = None) -> Quality | None:
        """Error, confusion and calibration of `network` on the test set after so many steps; None without a test set."""
        return measure(*found) if (found := self.test_predictions(network, steps)) else None

    def test_predictions(self, network: Network, steps: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Probabilities (N, K) and true classes (N,) of the test images after so many steps; None without a test set."""
        if self._test is None:
            return None
        images, labels = self._test
        return finite(predict_probabilities(network, images, self._normalizer_after(steps)).cpu()), labels

    def evaluated(self, models: Models) -> Network:
        """The model whose error the method reports."""
        return models.teacher if self.spec.method.evaluated == "ema" else models.student

    def deployed_network(self, models: Models) -> Network:
        """The network that predicts images."""
        return self.evaluated(models)

    def deployed(self, models: Models, error: float | None = None) -> tuple[bytes, dict[str, Any]]:
        """What prediction needs: the contents of `model.safetensors` and of `config.json`."""
        spec, train_set, test = self.spec, self.data.train, self.data.test
        network = self.deployed_network(models)
        weights = safetensors.torch.save(network.deployed_state())
        config = {
            "format": 1,
            "network": spec.network.model_dump(mode="json"),
            "architecture": getattr(network.backbone, "architecture", None),
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
