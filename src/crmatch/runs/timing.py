"""How many steps fit into a given time, from the speed of the first steps."""

from __future__ import annotations

import sys
import time
from dataclasses import replace as replace_fields

from crmatch.augment.batches import BatchMaker
from crmatch.runs.experiment import Experiment
from crmatch.spec.run_spec import RunSpec, replace
from crmatch.training.loop import Training

LEAST_TIMED_STEPS = 3
TIMED_SHARE = 0.01
"""Share of the time in which the speed is measured: on a shared machine, few steps say little."""
EVALUATIONS = 5
RESERVE = 0.95
"""Share of the time that is planned for; the rest is for checkpoints and a machine that slows down."""


def fit_steps(experiment: Experiment, seconds: float) -> RunSpec:
    """The spec of `experiment` with as many steps as fit into `seconds`, evaluations included.

    The steps that are timed train a copy of the run that is thrown away.
    """
    training, plan = experiment.training(), experiment.spec.plan
    if plan.start_size is None:
        per_step = _step_seconds(training, TIMED_SHARE * seconds)
    else:
        assert isinstance(training.batches, BatchMaker)
        small, full = (replace_fields(training.batches, start_steps=steps) for steps in (sys.maxsize, 0))
        per_step = 0.0
        for batches, share in ((small, plan.start_share), (full, 1 - plan.start_share)):
            training.batches = batches
            per_step += share * _step_seconds(training, TIMED_SHARE / 2 * seconds)
    started = time.perf_counter()
    experiment.measure(training.models.teacher)
    evaluating = 2 * EVALUATIONS * (time.perf_counter() - started)  # EMA and raw weights
    steps = max(1, int((RESERVE * seconds - evaluating) / per_step))
    lengths = {"plan.steps": steps, "plan.unlabeled_epochs": None}
    rhythm = {"evaluate_every": -(-steps // EVALUATIONS), "log_every": -(-steps // 50), "checkpoint_every": -(-steps // 10)}
    return replace(experiment.spec, **lengths, **{f"plan.{key}": value for key, value in rhythm.items()})


def _step_seconds(training: Training, seconds: float) -> float:
    """Seconds of a step, measured for about so many seconds."""
    training.take_step()  # the first step is slower
    timed, elapsed, started = 0, 0.0, time.perf_counter()
    while timed < LEAST_TIMED_STEPS or elapsed < seconds:
        training.take_step()
        timed, elapsed = timed + 1, time.perf_counter() - started
    return elapsed / timed
