"""Resuming a run, in the order in which `run` asks.

1. `finished_record`: what does the directory hold? Nothing, this run unfinished, this run finished, or another run (an error).
2. `restore`: continue from the newest checkpoint, if code and data are those of the start; warn if the result will only be
   equal up to rounding.
3. `checkpoint_values`: what a new checkpoint stores so that 2 can be checked.
4. `locate_divergence`: if training diverged, replay from the last good checkpoint to find the first bad step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import torch

import crmatch
from crmatch.atomic_files import read_json
from crmatch.errors import CRMatchError, DataError, DivergedError, RequestError, ResumeError
from crmatch.runs.directory import RunDirectory
from crmatch.runs.record import RunRecord
from crmatch.spec.run_spec import NUMERICS, RunSpec
from crmatch.training.checkpoint import Checkpoint, checkpoint_files, load_checkpoint
from crmatch.training.health import ADVICE, LateDivergenceError
from crmatch.training.loop import Training

logger = logging.getLogger(__name__)
EARLIER = {number: f"crmatch of commit {commit}" for number, commit in {1: "e72eb30", 2: "0e2c620", 3: "7ed868c"}.items()}
"""Versions that can resume runs of earlier numerics, whose checkpoints do not name one."""


def finished_record(directory: RunDirectory, spec: RunSpec, resume: Literal["auto", "never"]) -> RunRecord | None:
    """The record if the run is finished, None if it can be started or resumed; raises if the directory holds another run.

    A finished run whose model was damaged or removed is resumed: its last checkpoint is that of the last step.
    """
    started = directory.read_spec()
    if started is None:
        if directory.record.exists() or checkpoint_files(directory.checkpoints):
            found = f"{directory.path} holds a run without its spec.json"
            raise ResumeError(f"{found}.\nBring the file back, choose another --out, or remove the directory.")
        return None
    if started != spec:  # a recipe that has changed since then, or another spec
        _check_writer(directory)
    directory.check_spec(started, spec)
    if resume == "never":
        found = f"{directory.path} already holds this run, and --resume never was asked for"
        raise RequestError(f"{found}.\nUse --resume auto to resume it, choose another --out, or remove the directory.")
    record = directory.read_record()
    if record and not directory.model_is_intact():
        logger.warning("the model in %s is missing or damaged, so it is made again from the last checkpoint", directory.path)
        return None
    return record


def restore(training: Training, directory: RunDirectory, fingerprint: str) -> bool:
    """Continue from the newest checkpoint; False if there is none. `fingerprint` is that of the data as it is now."""
    checkpoint = load_checkpoint(directory.checkpoints)
    if not training.runtime.processes.same(checkpoint.step if checkpoint else 0):
        raise ResumeError(f"the processes find different checkpoints in {directory.path}.\nGive all of them the same --out.")
    if checkpoint is None:
        return False
    try:
        _check(checkpoint, directory, fingerprint, checkpoint_values(training))
        training.restore(checkpoint)
        if checkpoint.step > training.total_steps or not (0 <= training.images <= 10**15 and 0 <= training.seconds < math.inf):
            raise ValueError("impossible counts")
    except CRMatchError:
        raise
    except (KeyError, IndexError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        found = f"the checkpoint of step {checkpoint.step} in {directory.path} does not fit its spec"
        raise ResumeError(f"{found}.\nRemove the directory to start the run from the beginning.") from error
    logger.info("resuming %s after step %d", directory.path, checkpoint.step)
    return True


def checkpoint_values(training: Training) -> dict[str, Any]:
    """What decides whether a resumed run is bit-identical: version, threads, processes, compiled code, the method's code."""
    version = {"version": f"crmatch {crmatch.__version__}", "numerics": NUMERICS}
    machine = {"threads": torch.get_num_threads(), "processes": training.runtime.processes.count}
    return {**version, **machine, "compiled": training.runtime.compile, "code": training.method.code}


def _check(checkpoint: Checkpoint, directory: RunDirectory, fingerprint: str, now: dict[str, Any]) -> None:
    before = {"processes": 1, "compiled": False, **checkpoint.values}
    if type(before["numerics"]) is not int:
        raise ValueError("numerics is not an integer")
    _check_numerics(directory, before["numerics"], before.get("version"))
    split = read_json(directory.split)
    started = split.get("data_fingerprint") if isinstance(split, dict) else None
    if not isinstance(started, str):
        raise DataError(f"{directory.split} is damaged.\nRestore it, or remove the directory to start the run again.")
    if started != fingerprint:
        found = f"the data of {directory.path} changed since the run began (fingerprint {started} then, {fingerprint} now)"
        raise DataError(f"{found}.\nBring the old data back, or choose another --out.")
    then, here = (
        f"{'compiled' if values['compiled'] else 'eager'} code, {values['threads']} threads, {values['processes']} processes"
        for values in (before, now)
    )
    if then != here:
        logger.warning("this run began with %s and resumes with %s: the result will not be bit-identical", then, here)


def _check_numerics(directory: RunDirectory, before: int, version: str | None = None) -> None:
    if before != NUMERICS:
        found = f"{directory.path} was started with numerics {before}; this version has {NUMERICS}"
        writer = version or EARLIER.get(before, "the version that started it")
        raise ResumeError(f"{found}.\nUse {writer} for it, choose another --out, or remove the directory.")


def _check_writer(directory: RunDirectory) -> None:
    """Raise a `ResumeError` if a version with other numerics has written the run."""
    if (record := directory.read_record()) is not None:
        _check_numerics(directory, record.numerics)
    elif checkpoint := load_checkpoint(directory.checkpoints):
        before = checkpoint.values.get("numerics")
        if isinstance(before, int):  # otherwise it is damaged, which `restore` would find
            _check_numerics(directory, before, checkpoint.values.get("version"))


def locate_divergence(
    error: DivergedError, begin: Callable[[], Training], directory: RunDirectory, reached: int
) -> DivergedError:
    """`error` after `reached` steps, with the first bad step and the name of the last good checkpoint.

    A GPU notices a divergence some steps late: the steps since the checkpoint are then replayed on a `begin()` run.
    """
    if isinstance(error, LateDivergenceError):
        replay = begin()
        replay.divergence_watch.immediate = True
        if (checkpoint := load_checkpoint(directory.checkpoints)) is not None:
            replay.restore(checkpoint)
        try:
            while replay.step < reached:
                replay.take_step()
        except DivergedError as first:
            error = first
    checkpoints = checkpoint_files(directory.checkpoints)
    good = f"the last good checkpoint is {checkpoints[0].name}" if checkpoints else "no checkpoint had been saved before"
    return DivergedError(f"{str(error).splitlines()[0]}\n{ADVICE}; {good}.")
