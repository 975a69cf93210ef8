"""run(spec) -> RunRecord: train one run in its directory, resume it, or return its finished record."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock, Timeout

import crmatch
from crmatch.atomic_files import remove_leftovers, write_file, write_json
from crmatch.augment.policies import LearningPolicy
from crmatch.data.splits import describe_split, keep_split
from crmatch.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from crmatch.errors import DataError, DivergedError, InUseError, RequestError, ResumeError, StoppedError
from crmatch.runs.directory import CurveFile, RunDirectory, run_directory
from crmatch.runs.experiment import Experiment, Progress, load_run_data
from crmatch.runs.memory import check_memory, free_bytes
from crmatch.runs.model_card import model_card
from crmatch.runs.record import Errors, RunRecord
from crmatch.runs.resume import execution_settings, locate_divergence, restore
from crmatch.spec.recipes import setting_of
from crmatch.spec.run_spec import NUMERICS, RunSpec, differences
from crmatch.training.checkpoint import Checkpoint, checkpoint_files, load_checkpoint, save_checkpoint
from crmatch.training.execution import Execution
from crmatch.training.loop import Curves, Training, train
from crmatch.training.runtime import choose_runtime, describe_machine

logger = logging.getLogger(__name__)


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
    processes: ProcessGroup = SINGLE_PROCESS,
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
    runtime = choose_runtime(Execution(device, compile, recompute), spec.precision, processes)
    # The first process goes on when all have come here, so nothing is written before all have looked.
    data, split = processes.main_first(lambda: load_run_data(spec, setting, data_dir))
    experiment = Experiment(spec, data, split, runtime)
    free = free_bytes() if runtime.device.type == "cpu" else torch.cuda.mem_get_info(runtime.device)[0]
    check_memory(spec, setting, free, recompute, runtime.lean)
    with _locked(directory) if processes.is_main else nullcontext():
        finished = _finished(directory, spec, resume) if processes.is_main else None
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
    elif processes.is_main:
        keep_split(directory.split, description)
        write_json(directory.spec, spec.to_json())
    curves = CurveFile(directory, training.step, processes.is_main)

    def log(line: Curves) -> None:
        curves.append(line)
        if progress:
            progress.log(line)

    def save(state: Checkpoint) -> None:
        if not processes.is_main:
            return
        curves.flush()
        values = {**state.values, "numerics": NUMERICS, **execution_settings(training)}
        save_checkpoint(directory.checkpoints, state._replace(values=values))

    if progress:
        progress.start(training.step, training.total_steps)
    advance = progress.advance if progress else lambda steps: None
    observers = experiment.observers(log, save=save, advance=advance, stop=stop)
    with curves:
        try:
            finished = train(training, observers)
        except DivergedError as error:
            raise locate_divergence(error, experiment.training, directory, training.step) from error
        if not finished:
            raise StoppedError(
                f"stopped after step {training.step} of {training.total_steps}; everything is saved in {directory.path}.\n"
                "The same command continues."
            )
    record = _record(experiment, training, curves.lines)
    if processes.is_main:
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
        machine=describe_machine(experiment.runtime),
        final=lines[-1],
        policy=policy.rates() if isinstance(policy, LearningPolicy) else None,
    )
