"""Experiment trackers: `crmatch train ... --tracker NAME` writes a run's curves for TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol

from crmatch.atomic_files import read_json, write_json
from crmatch.errors import DataError, RequestError, unknown_name_error
from crmatch.runs.directory import RunDirectory
from crmatch.runs.experiment import Progress
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec, flatten

Line = Mapping[str, Any]
TAGS = {
    "pseudo_label_error": "pl/error_all",
    "contributing_error": "pl/error_used",
    "error/ema": "eval/error_ema",
    "error/raw": "eval/error_raw",
    "images_per_second": "sys/images_per_second",
    "seconds": "sys/seconds",
}
"""Curve -> tag; `loss/NAME` becomes `train/loss_NAME`, and any other curve becomes `train/NAME`."""
MOST_METRICS, MOST_PARAMS = 1000, 100
"""Numbers of values that MLflow accepts at once."""


class Tracker(Protocol):
    """A tool that shows the curves of one run. None of its calls may write a point that it wrote in an earlier start."""

    errors: tuple[type[Exception], ...]
    """What it raises if it cannot write."""

    def begin(self, lines: Sequence[Line]) -> None:
        """Start, or start again, with the curves so far."""

    def write(self, line: Line) -> None:
        """Add one line of curves."""

    def close(self, finished: bool) -> None:
        """The run is finished, or has stopped."""


class TrackedProgress(AbstractContextManager["TrackedProgress"]):
    """Passes a run's curves to a tracker while it trains, and everything to another progress display.

    A resumed run begins with the curves of `metrics.jsonl` up to the step it resumes from. A run that was finished before is
    passed on at the end.
    """

    def __init__(self, tracker: Tracker, directory: RunDirectory, beside: Progress) -> None:
        self._tracker, self._directory, self._beside = tracker, directory, beside
        self._begun = False

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if not self._begun and kind is None:
            self._begin(self._directory.read_metrics())
        if self._begun:
            with suppress(*self._tracker.errors):  # a full disk was reported when the curves were written
                self._tracker.close(finished=kind is None)

    def start(self, done: int, total: int) -> None:
        """Begin with the curves up to step `done`."""
        self._beside.start(done, total)
        self._begin([line for line in self._directory.read_metrics() if line["step"] <= done])

    def features(self, done: int, total: int) -> None:
        """Pass the number of computed features on."""
        self._beside.features(done, total)

    def advance(self, done: int) -> None:
        """Pass the step on; trackers get log points only."""
        self._beside.advance(done)

    def log(self, line: dict[str, Any]) -> None:
        """Pass one line of curves on."""
        self._beside.log(line)
        try:
            self._tracker.write(line)
        except self._tracker.errors as error:
            raise self._failure(error) from error

    def _begin(self, lines: list[dict[str, Any]]) -> None:
        try:
            self._tracker.begin(lines)
        except self._tracker.errors as error:
            raise self._failure(error) from error
        self._begun = True

    def _failure(self, error: Exception) -> DataError:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0].rstrip(".")[:200]
        found = f"{type(self._tracker).__name__} cannot write the curves of {self._directory.path}: {reason}"
        return DataError(f"{found}.\nRun the same command again to resume, with another --tracker or without it.")


class TensorBoard:
    """Event files in `RUN/tensorboard/`; a resumed run replaces them by one that begins with the curves so far."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, directory: RunDirectory, spec: RunSpec, out: Path) -> None:
        self._folder = directory.tensorboard

    def begin(self, lines: Sequence[Line]) -> None:
        """Replace the event files."""
        from torch.utils.tensorboard import SummaryWriter

        for old in self._folder.glob("events.out.tfevents.*"):
            old.unlink()
        # With purge_step, a TensorBoard that shows this run drops the points of the removed files.
        self._writer = SummaryWriter(str(self._folder), purge_step=0)
        self._began = start_time(lines)
        for line in lines:
            self.write(line)

    def write(self, line: Line) -> None:
        """Write events."""
        for tag, value in scalars(line):
            self._writer.add_scalar(tag, value, line["step"], walltime=self._began + line["seconds"])
        self._writer.flush()

    def close(self, finished: bool) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """One MLflow run, in the store `$MLFLOW_TRACKING_URI` or else `OUT/mlruns`; `RUN/mlflow.json` holds its id.

    MLflow cannot remove points, so a resumed run continues after the last point of each curve. This loses nothing: a
    resumed run repeats its losses and errors exactly.
    """

    def __init__(self, directory: RunDirectory, spec: RunSpec, out: Path) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it, MLflow refuses to keep runs in files
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # training sends nothing to anybody unless asked to
        from mlflow.exceptions import MlflowException

        # ImportError: a store in a database needs packages that mlflow-skinny leaves out.
        self.errors: tuple[type[Exception], ...] = (OSError, ImportError, MlflowException)
        self._store = os.environ.get("MLFLOW_TRACKING_URI") or (out / "mlruns").absolute().as_uri()
        self._directory, self._spec = directory, spec

    def begin(self, lines: Sequence[Line]) -> None:
        """Continue the run of an earlier start, or create one with the spec as parameters."""
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(self._store)
        self._run = self._earlier_run() or self._create_run()
        self._client.update_run(self._run, status="RUNNING")
        self._last = {
            tag: max((point.step for point in self._client.get_metric_history(self._run, tag)), default=-1)
            for tag in self._client.get_run(self._run).data.metrics
        }
        self._began = start_time(lines)
        self._log(lines)

    def _earlier_run(self) -> str | None:
        if not self._directory.mlflow.exists():
            return None
        run: str = read_json(self._directory.mlflow)["run"]
        with suppress(*self.errors):  # the store may be another one, or may have been removed
            if self._client.get_run(run).info.lifecycle_stage == "active":
                return run
        return None

    def _create_run(self) -> str:
        from mlflow.entities import Param

        name = self._spec.setting
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        path = self._directory.path
        run: str = self._client.create_run(experiment, run_name=f"{path.parent.name}/{path.name}").info.run_id
        params = [Param(key, str(value)) for key, value in flatten(self._spec.to_json())]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run, params=params[start : start + MOST_PARAMS])
        write_json(self._directory.mlflow, {"run": run})
        return run

    def write(self, line: Line) -> None:
        """Add the points of a line that an earlier start has not written."""
        self._log([line])

    def _log(self, lines: Sequence[Line]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(tag, value, int(1000 * (self._began + line["seconds"])), line["step"])
            for line in lines
            for tag, value in scalars(line)
            if line["step"] > self._last.get(tag, -1)
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MOST_METRICS])

    def close(self, finished: bool) -> None:
        """Set the run's status."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


class WandB:
    """An offline run of Weights & Biases in `RUN/wandb/`, for `wandb sync`; a resumed run replaces it under the same id."""

    def __init__(self, directory: RunDirectory, spec: RunSpec, out: Path) -> None:
        import wandb

        self.errors: tuple[type[Exception], ...] = (OSError, wandb.Error)
        self._directory, self._spec = directory, spec

    def begin(self, lines: Sequence[Line]) -> None:
        """Replace the offline run."""
        import wandb

        path = self._directory.path
        earlier = [old.name.rpartition("-")[2] for old in (path / "wandb").glob("offline-run-*")]
        shutil.rmtree(path / "wandb", ignore_errors=True)
        self._run = wandb.init(
            project="crmatch",
            group=self._spec.setting,
            name=f"{path.parent.name}/{path.name}",
            id=earlier[0] if earlier else None,
            config=self._spec.to_json(),
            dir=path,
            mode="offline",
            settings=wandb.Settings(silent=True, console="off"),
        )
        for line in lines:
            self.write(line)

    def write(self, line: Line) -> None:
        """Add one line of curves."""
        self._run.log(dict(scalars(line)), step=line["step"])

    def close(self, finished: bool) -> None:
        """End the offline run."""
        import wandb

        self._run.finish(exit_code=0 if finished else 1)
        wandb.teardown()  # only this waits until the file is written


TRACKERS: dict[str, Callable[[RunDirectory, RunSpec, Path], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
"""The name of a tracker is also that of its package and of the extra that installs it."""


def tracked(name: str, spec: RunSpec, workspace: Workspace, beside: Progress) -> TrackedProgress:
    """The progress of a run with a tracker from the table `TRACKERS`; RequestError if its package is not installed."""
    if name not in TRACKERS:
        raise unknown_name_error("tracker", name, TRACKERS)
    if importlib.util.find_spec(name) is None:
        raise RequestError(f"--tracker {name} needs a package that is not installed.\npip install 'crmatch[{name}]'")
    directory = workspace.run_directory(spec)
    return TrackedProgress(TRACKERS[name](directory, spec, workspace.out), directory, beside)


def start_time(lines: Sequence[Line]) -> float:
    """When training would have started without interruptions: times of points exclude those before a continuation."""
    return time.time() - (lines[-1]["seconds"] if lines else 0)


def scalars(line: Line) -> Iterator[tuple[str, float]]:
    """Tag and value of every curve that has a value at this log point."""
    for key, value in line.items():
        if key == "step" or not isinstance(value, int | float):
            continue
        group, _, name = key.rpartition("/")
        yield TAGS.get(key, f"train/loss_{name}" if group == "loss" else f"train/{name}"), float(value)
