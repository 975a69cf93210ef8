"""The runs of one `crmatch train` command: how each is trained and shown."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from crmatch.cli.display import Display
from crmatch.cli.options import is_main_process
from crmatch.distributed.process_group import ProcessGroup
from crmatch.errors import RequestError
from crmatch.networks.config import PretrainedConfig
from crmatch.runs.cost import describe_cost, duration, estimate, on_cpu, threads_in_use, tuning_seconds
from crmatch.runs.experiment import Progress
from crmatch.runs.record import RunRecord
from crmatch.runs.run import make_experiment, run
from crmatch.runs.signals import stop_request
from crmatch.runs.timing import fit_steps
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import FOLLOW_FROM_MINUTES, head_of
from crmatch.spec.run_spec import RunSpec, replace
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime

LEAST_TUNING_STEPS = 20


@dataclass(frozen=True)
class Session:
    """What the runs of one command have in common."""

    execution: Execution
    resume: Literal["auto", "never"]
    trackers: Sequence[str]
    speaks: bool  # whether progress is shown; only the main process shows it
    processes: ProcessGroup
    started: float  # when the command started, by time.monotonic()

    def train(
        self, spec: RunSpec, workspace: Workspace, minutes: float | None = None, share: float = 1.0
    ) -> tuple[Path, RunRecord]:
        """Train a run, or resume it; returns its directory and its record.

        With `minutes`, its steps fit into a share of the time that is left. If that is too short to tune a network, the
        classifier on its frozen features is kept.
        """
        with ExitStack() as stack:
            display = stack.enter_context(self._display(spec))
            progress: Progress = display
            if minutes:
                if self.processes.count > 1:
                    raise RequestError("--minutes works with one process only.\nUse --steps, or train without torchrun.")
                seconds = share * (60 * minutes - (time.monotonic() - self.started))
                spec = self._fit_into(minutes, seconds, spec, workspace, progress)
                if spec.recipe == "tune" and (spec.plan.steps or 0) < LEAST_TUNING_STEPS:
                    if self.speaks:
                        found = f"The time that is left is too short for {LEAST_TUNING_STEPS} steps of tuning"
                        typer.echo(f"{found}: the network stays frozen. Use more --minutes.", err=True)
                    return self.train(head_of(spec, workspace.setting_of(spec)), workspace.named(None))
            for name in self.trackers if is_main_process() else ():
                from crmatch.cli.trackers import tracked

                progress = stack.enter_context(tracked(name, spec, workspace, beside=progress))
            display.cost = self._cost(spec, workspace)
            if self.speaks and is_main_process() and os.environ.get("OMP_WAIT_POLICY") == "PASSIVE" and threads_in_use() > 1:
                # Chosen by __main__.py, or by the user.
                typer.echo("Waiting threads sleep, to share the cores with other programs (OMP_WAIT_POLICY=PASSIVE).", err=True)
            stop = stop_request()
            record = run(
                spec, workspace, self.execution, resume=self.resume, progress=progress, stop=stop, processes=self.processes
            )
        return workspace.run_directory(spec).path, record

    def _cost(self, spec: RunSpec, workspace: Workspace) -> str:
        steps = spec.plan.steps
        if isinstance(spec.network, PretrainedConfig) and steps:
            seconds = tuning_seconds(spec, steps)
            time_needed = f", about {duration(seconds)} {on_cpu()}" if seconds else ""
            return f"{steps:,} steps" + (time_needed if spec.network.train == "all" else " on stored features, a few seconds")
        cost = estimate(spec, workspace.setting_of(spec), self.execution.activations)
        if spec.plan.minutes is None:
            return describe_cost(cost)
        # The steps were chosen by their measured speed, which says more than an estimate.
        start, size = spec.plan.start_size, spec.data.image_size
        images = f"{cost.images_per_step:,} images" + (f", first of {start}, then of {size} px" if start else f" of {size} px")
        return f"{steps:,} steps of {images}, chosen to fit into {spec.plan.minutes:g} minutes"

    def _display(self, spec: RunSpec) -> Display:
        return Display(spec, quiet=not (self.speaks and is_main_process()))

    def _fit_into(self, minutes: float, seconds: float, spec: RunSpec, workspace: Workspace, progress: Progress) -> RunSpec:
        """`spec` with as many steps as fit into `seconds`; a run that was started before keeps its number."""
        spec = replace(spec, **{"plan.minutes": minutes})
        directory = workspace.run_directory(spec)
        if (begun := directory.read_spec()) is not None:
            chosen = {f"plan.{key}": getattr(begun.plan, key) for key in (*FOLLOW_FROM_MINUTES, "unlabeled_epochs")}
            directory.check_spec(begun, replace(spec, **chosen))
            return begun
        runtime = choose_runtime(self.execution, spec.precision)
        experiment = make_experiment(spec, *workspace.load(spec), runtime, workspace, self.execution, progress, stop_request())
        return fit_steps(experiment, seconds)
