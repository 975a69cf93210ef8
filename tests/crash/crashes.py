"""Kills at random moments and resumes at random steps: what must be true after each, and at the end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from conftest import tiny_spec
from crmatch.runs.directory import RunDirectory
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec, replace
from finished import Result, result_of, stripes_in

HERE = Path(__file__).resolve().parent
STEPS, INTERVAL = 24, 4
KILLED = -signal.SIGKILL


def spec_of(data_dir: Path, method: str) -> RunSpec:
    """A run of a second or two in which every term is active and CTAugment learns."""
    keys = {"plan.steps": STEPS, "plan.unlabeled_batch_size": 8, "plan.evaluate_every": 6, "plan.log_every": 1}
    keys |= {"plan.checkpoint_every": INTERVAL, "augmentation.policy": "ctaugment"}
    spec: RunSpec = tiny_spec(data_dir, method, **keys)
    return replace(spec, **{"method.threshold": 0.4}) if "threshold" in type(spec.method).model_fields else spec


class Forks:
    """The forking process (forks.py), as a context."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}
        command, pipe = [sys.executable, str(HERE / "forks.py")], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate(timeout=60)

    def begin(self, spec: RunSpec, workspace: Workspace, stop_after: int | None = None, here: bool = False) -> int:
        """Start a run in a child and return its process id; or run it in the forking process itself."""
        places = {"out": str(workspace.out), "data_dir": str(workspace.data_dir)}
        return self._ask({"spec": spec.to_json(), **places, "stop_after": stop_after, "here": here})

    def wait(self, child: int) -> int:
        """The exit code of a child."""
        return self._ask({"wait": child})

    def finish(self, spec: RunSpec, workspace: Workspace, stop_after: int | None = None) -> int:
        """Run to the end, or to a stop; the exit code."""
        return self.wait(self.begin(spec, workspace, stop_after))

    def _ask(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class Kill(NamedTuple):
    """Last step in the curves, and step of the newest checkpoint (0 if there was none), after a kill."""

    reached: int
    saved: int


def check_after_kill(directory: RunDirectory) -> Kill:
    """The last checkpoint is readable, and no more than one interval is lost."""
    from crmatch.training.checkpoint import load_checkpoint

    checkpoint, lines = load_checkpoint(directory.checkpoints), directory.read_metrics()
    kill = Kill(lines[-1]["step"] if lines else 0, checkpoint.step if checkpoint else 0)
    assert kill.reached - kill.saved <= INTERVAL, kill
    return kill


class Lab:
    """Runs of one forking process in one folder."""

    def __init__(self, forks: Forks, folder: Path, seed: int) -> None:
        self.forks, self.folder, self.random = forks, folder, random.Random(seed)
        self.data_dir = stripes_in(folder / "data", per_class=8, side=8, channels=1)
        assert forks.begin(self.spec("crmatch"), self.workspace(), stop_after=2, here=True) == 75
        self._straight: dict[str, tuple[Result, float]] = {}

    def spec(self, method: str) -> RunSpec:
        """The tiny run of a method."""
        return spec_of(self.data_dir, method)

    def workspace(self) -> Workspace:
        """A new directory of runs."""
        return Workspace.at(tempfile.mkdtemp(dir=self.folder), self.data_dir)

    def straight(self, method: str) -> tuple[Result, float]:
        """Result and seconds of the run without interruption."""
        if method not in self._straight:
            spec, workspace, began = self.spec(method), self.workspace(), time.perf_counter()
            assert self.forks.finish(spec, workspace) == 0
            self._straight[method] = result_of(workspace.run_directory(spec)), time.perf_counter() - began
        return self._straight[method]

    def kill_until_done(self, method: str, kills: int) -> list[Kill]:
        """Kill a run up to `kills` times at random moments, let it end, and compare."""
        expected, seconds = self.straight(method)
        spec, workspace, found, code = self.spec(method), self.workspace(), list[Kill](), KILLED
        while code == KILLED and len(found) < kills:
            child = self.forks.begin(spec, workspace)
            time.sleep(self.random.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            code = self.forks.wait(child)
            found += [check_after_kill(workspace.run_directory(spec))] if code == KILLED else []
        assert code in (KILLED, 0)
        assert self.forks.finish(spec, workspace) == 0
        assert result_of(workspace.run_directory(spec)) == expected, f"{method} after {len(found)} kills"
        return found

    def resume(self, method: str, resumes: int) -> list[int]:
        """Stop a run at `resumes` random steps and resume it each time, then compare; returns the steps."""
        expected, _ = self.straight(method)
        spec, workspace = self.spec(method), self.workspace()
        steps = sorted(self.random.sample(range(1, STEPS), resumes))
        for before, step in zip([0, *steps], steps, strict=False):
            assert self.forks.finish(spec, workspace, stop_after=step - before) == 75
        assert self.forks.finish(spec, workspace) == 0
        assert result_of(workspace.run_directory(spec)) == expected, f"{method} stopped at {steps}"
        return steps
