"""run(spec) -> RunRecord: the only place that wires data, method, training and files together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, Protocol

import safetensors.torch
import torch
from filelock import FileLock, Timeout
from torch import Tensor

import crmatch
from crmatch.augment.batch import BatchMaker
from crmatch.augment.normalize import Normalizer
from crmatch.augment.policies import LearningPolicy, build_policy
from crmatch.augment.views import Batch
from crmatch.augment.weak import WeakAugmentation
from crmatch.collapse import CollapseWatch
from crmatch.config import NUMERICS, RunSpec, differences
from crmatch.continuing import explained, how_it_computes, restore
from crmatch.data.folder import load_folder, scan_folder
from crmatch.data.images import DataSet
from crmatch.data.more_labels import add_labels
from crmatch.data.sets import load_data
from crmatch.data.settings import Setting, default_data_dir
from crmatch.data.splits import Split, describe_split, given_split, keep_split, make_split
from crmatch.errors import DataError, DivergedError, InUseError, RequestError, ResumeError, StoppedError
from crmatch.evaluation import Quality, measure, predict_probabilities, pseudo_label_counts, pseudo_label_quality
from crmatch.files import checksum, remove_leftovers, write_file, write_json
from crmatch.memory import check_memory, free_bytes
from crmatch.methods.base import LossTerms, Models
from crmatch.model_card import model_card
from crmatch.networks.build import build_network
from crmatch.networks.outputs import Network
from crmatch.processes import ALONE, Processes
from crmatch.recipes import setting_of
from crmatch.results import CurveFile, Errors, RunDirectory, RunRecord, run_directory
from crmatch.training.checkpoint import Checkpoint, checkpoint_files, load_checkpoint, save_checkpoint
from crmatch.training.loop import Curves, Observers, Training, train
from crmatch.training.runtime import Runtime, choose_runtime, describe_machine

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
                self._collapse.look(line)
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
    cache = (data_dir or default_data_dir()) / "folders"
    pictures = load_folder(scan_folder(setting.folder, setting.labels_file), spec.data.image_size, cache)
    split = given_split(pictures.train.labels, spec.data.unlabeled)
    if not len(split.unlabeled):
        raise RequestError(
            f"{setting.folder} has no unlabeled pictures.\n"
            "Put some into unlabeled/, or use the labeled ones as such: --set data.unlabeled=all"
        )
    return DataSet(pictures.train, pictures.test), split


def run(
    spec: RunSpec,
    out: Path | str = "runs",
    *,
    data_dir: Path | None = None,
    device: str = "auto",
    compile: bool = False,
    recompute: bool = False,
    resume: Literal["auto", "never"] = "auto",
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    processes: Processes = ALONE,
) -> RunRecord:
    """Train `spec` and return its record; a finished run is returned as it is, a stopped one is continued.

    Args:
        spec: what to train.
        out: where runs are kept; this one goes to `<out>/<setting>/<method>[-<variant>]/split<k>-seed<s>/`.
        data_dir: where packed sets lie.
        device: `auto`, `cpu`, `cuda`.
        compile: compile the backbone's training passes: faster, and equal up to rounding only.
        recompute: keep little for the backward pass and compute it again: slower, in a fraction of the memory.
        resume: `auto` continues what is there; `never` refuses to.
        progress: who watches.
        stop: asked before every step; True saves and raises `StoppedError`.
        processes: who shares the run, each of them calling this function; the first one writes.
    """
    setting = setting_of(spec, data_dir)
    directory = run_directory(Path(out), spec, setting)
    if (finished := _finished(directory, spec, resume)) is not None:
        return finished
    runtime = choose_runtime(device, spec.precision, processes, compile=compile, recompute=recompute)
    # The first process goes on when all have come here, so nothing is written before all have looked.
    data, split = processes.in_turn(lambda: load_run_data(spec, setting, data_dir))
    experiment = Experiment(spec, data, split, runtime)
    free = free_bytes() if runtime.device.type == "cpu" else torch.cuda.mem_get_info(runtime.device)[0]
    check_memory(spec, setting, free, recompute, runtime.lean)
    with _locked(directory) if processes.leads else nullcontext():
        finished = _finished(directory, spec, resume) if processes.leads else None
        if processes.any(finished is not None) and (finished := directory.read_record()) is not None:
            return finished
        return _train(experiment, directory, progress, stop)


def _finished(directory: RunDirectory, spec: RunSpec, resume: str) -> RunRecord | None:
    """The record where the run is finished; raises where the directory holds anything but this run."""
    started = directory.read_spec()
    if started is None:
        if directory.record.exists() or checkpoint_files(directory.checkpoints):
            raise ResumeError(
                f"{directory.path} holds a run without its spec.json.\nBring the file back, choose another --out, or remove it."
            )
        return None
    if started != spec:
        changed = [f"{key} is {old!r} there, {new!r} here" for key, (old, new) in differences(started, spec).items()]
        raise RequestError(
            f"{directory.path} holds a run of another spec: {'; '.join(changed[:3])}.\nChoose another --out, or remove it."
        )
    if resume == "never":
        raise RequestError(
            f"{directory.path} already holds this run, and --resume never was asked for.\n"
            "Use --resume auto to continue it, choose another --out, or remove it."
        )
    return directory.read_record()


@contextmanager
def _locked(directory: RunDirectory) -> Iterator[None]:
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory.lock, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise InUseError(
            f"{directory.path} is in use by another process.\nWait until it ends, or choose another --out."
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot write to {directory.path}: {error.strerror}.\nChoose a directory you may write to with --out."
        ) from error
    try:
        remove_leftovers(directory.path)
        yield
    finally:
        lock.release()


def _train(experiment: Experiment, directory: RunDirectory, progress: Progress | None, stop: Callable[[], bool]) -> RunRecord:
    spec, training = experiment.spec, experiment.training()
    train_set = experiment.data.train
    rule = "folder" if spec.data.folder else spec.data.split_rule
    description = describe_split(experiment.split, train_set, spec.setting, spec.split, rule)
    processes = experiment.runtime.processes
    checkpoint = load_checkpoint(directory.checkpoints)
    if not processes.same(checkpoint.step if checkpoint else 0):
        raise ResumeError(f"the processes find different checkpoints in {directory.path}.\nGive all of them the same --out.")
    if checkpoint is not None:
        restore(training, checkpoint, directory, description["data_fingerprint"])
        logger.info("continuing %s after step %d", directory.path, checkpoint.step)
    elif processes.leads:
        keep_split(directory.split, description)
        write_json(directory.spec, spec.to_json())
    curves = CurveFile(directory, training.step, processes.leads)

    def log(line: Curves) -> None:
        curves.append(line)
        if progress:
            progress.log(line)

    def save(state: Checkpoint) -> None:
        if not processes.leads:
            return
        curves.flush()
        values = {**state.values, "numerics": NUMERICS, **how_it_computes(training)}
        save_checkpoint(directory.checkpoints, state._replace(values=values))

    if progress:
        progress.start(training.step, training.total_steps)
    advance = progress.advance if progress else lambda steps: None
    observers = experiment.observers(log, save=save, advance=advance, stop=stop)
    with curves:
        try:
            finished = train(training, observers)
        except DivergedError as error:
            raise explained(error, experiment.training, directory, training.step) from error
        if not finished:
            raise StoppedError(
                f"stopped after step {training.step} of {training.total_steps}; everything is saved in {directory.path}.\n"
                "The same command continues."
            )
    record = _record(experiment, training, curves.lines)
    if processes.leads:
        _write_results(experiment, training, record, directory)
    return record


def _write_results(experiment: Experiment, training: Training, record: RunRecord, directory: RunDirectory) -> None:
    """The model with its card, and last of all the record, which makes the run a finished one."""
    weights, config = experiment.deployed(training.models, record.error)
    write_file(directory.model, weights)
    write_json(directory.model_config, config)
    write_file(directory.card, model_card(record, config).encode())
    write_json(directory.record, record.model_dump(mode="json"))


def _record(experiment: Experiment, training: Training, lines: list[Curves]) -> RunRecord:
    if not lines:
        raise DataError("the curves (metrics.jsonl) of this run are gone.\nRemove its directory to start it again.")
    quality = experiment.measure(experiment.evaluated(training.models))
    data, spec = experiment.data, experiment.spec
    curve = {name: [line[f"error/{name}"] for line in lines if f"error/{name}" in line] for name in ("ema", "raw")}
    policy = training.batches.policy
    return RunRecord(
        spec=spec,
        numerics=NUMERICS,
        crmatch_version=crmatch.__version__,
        evaluated=spec.method.evaluated,
        ema=Errors.from_curve(curve["ema"]) if curve["ema"] else None,
        raw=Errors.from_curve(curve["raw"]) if curve["raw"] else None,
        per_class_error=quality.per_class if quality else [],
        confusion=quality.confusion if quality else [],
        calibration_error=quality.calibration_error if quality else None,
        class_names=list(data.train.class_names),
        labeled_images=len(experiment.split.labeled),
        unlabeled_images=len(experiment.split.unlabeled),
        test_images=len(data.test) if data.test else 0,
        data_fingerprint=data.train.fingerprint,
        steps=training.step,
        images_seen=training.images,
        seconds=round(training.seconds, 3),
        machine=describe_machine(experiment.runtime, training.compiled),
        final=lines[-1],
        policy=policy.rates() if isinstance(policy, LearningPolicy) else None,
    )
