"""Continuing a run from its checkpoints, and what they say about one that diverged."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from crmatch.atomic_files import read_json
from crmatch.errors import CRMatchError, DataError, DivergedError, ResumeError
from crmatch.runs.directory import RunDirectory
from crmatch.spec.run_spec import NUMERICS
from crmatch.training.checkpoint import Checkpoint, checkpoint_files, load_checkpoint
from crmatch.training.health import ADVICE, LateDivergenceError, first_divergence
from crmatch.training.loop import Training

logger = logging.getLogger(__name__)


def restore(training: Training, checkpoint: Checkpoint, directory: RunDirectory, fingerprint: str) -> None:
    """Continue from `checkpoint`, which must be of this run, on data with this fingerprint."""
    try:
        _check(checkpoint, directory, fingerprint, execution_settings(training))
        training.restore(checkpoint)
    except CRMatchError:
        raise
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
        raise ResumeError(
            f"the checkpoint of step {checkpoint.step} in {directory.path} does not fit its spec.\n"
            "Remove the run's directory to start it again from the beginning."
        ) from error


def execution_settings(training: Training) -> dict[str, int]:
    """What a checkpoint says of the machine: a run that continues otherwise is not equal to the bit."""
    return {
        "threads": torch.get_num_threads(),
        "processes": training.runtime.processes.count,
        "compiled": training.runtime.compile,
    }


def locate_divergence(
    error: DivergedError, begin: Callable[[], Training], directory: RunDirectory, reached: int
) -> DivergedError:
    """`error` with the name of the last good checkpoint; where it was noticed late, a replay from there finds its step.

    Args:
        error: what the loop raised.
        begin: makes the run at its beginning.
        directory: where its checkpoints lie.
        reached: steps that were taken.
    """
    checkpoints = checkpoint_files(directory.checkpoints)
    if isinstance(error, LateDivergenceError):
        replay = begin()
        replay.finite.immediate = True
        if (checkpoint := load_checkpoint(directory.checkpoints)) is not None:
            replay.restore(checkpoint)
        error = first_divergence(replay.take_step, reached - replay.step) or error
    good = f"the last good checkpoint is {checkpoints[0].name}" if checkpoints else "no checkpoint had been saved before"
    return DivergedError(f"{str(error).splitlines()[0]}\n{ADVICE}; {good}.")


def _check(checkpoint: Checkpoint, directory: RunDirectory, fingerprint: str, machine: dict[str, int]) -> None:
    """A checkpoint may be continued only by the same numerics on the same data."""
    if checkpoint.values["numerics"] != NUMERICS:
        raise ResumeError(
            f"{directory.path} was begun with numerics {checkpoint.values['numerics']}; this version has {NUMERICS}.\n"
            "Finish it with the version that started it, or remove it."
        )
    split = read_json(directory.split)
    started = split.get("data_fingerprint") if isinstance(split, dict) else None
    if started != fingerprint:
        raise DataError(
            f"the data of {directory.path} changed since the run began (fingerprint {started} then, {fingerprint} now).\n"
            "Bring the old data back, or choose another --out."
        )
    before = {"processes": 1, "compiled": False, **checkpoint.values}
    changed = [
        (f"with {before[unit]} {unit}", f"with {machine[unit]}")
        for unit in ("threads", "processes")
        if before[unit] != machine[unit]
    ]
    if before["compiled"] != machine["compiled"]:
        changed.append(("compiled", "eager") if before["compiled"] else ("eager", "compiled"))
    for began, continues in changed:
        logger.warning("this run began %s and continues %s: the result will not be equal to the bit", began, continues)
