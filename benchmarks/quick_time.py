#!/usr/bin/env python3
"""Where the time of `crmatch train SETTING` goes, how fast its convolutions are, and a step beside a busy process.

    export GOMP_SPINCOUNT=1000                # as the command `crmatch` sets it on a quiet machine
    python benchmarks/quick_time.py svhn_small@25 --data-dir DIR                 # three minutes on two quiet cores
    python benchmarks/quick_time.py svhn_small@25 --data-dir DIR --minutes 5     # eight minutes: a longer run

Prints three tables. Evaluations, checkpoints and batches are timed inside of the command; what is left besides the steps is
start-up and end. The busy process is an endless loop in Python. Every program in the second table has a process of its own,
because OpenMP reads these variables when torch is imported; rounds take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from convolutions import kernels_of
from torch.utils.flop_counter import FlopCounterMode

import crmatch.runs.run
from crmatch.augment.batches import BatchMaker
from crmatch.cli.app import main as crmatch_command
from crmatch.data.settings import parse_setting
from crmatch.runs.experiment import Experiment, load_run_data
from crmatch.spec.recipes import quick_image_size, quick_start_size, recipe
from crmatch.spec.run_spec import replace
from crmatch.training.loop import Training
from crmatch.training.runtime import choose_runtime

TIMED = {
    "steps": (Training, "take_step"),
    "batches": (BatchMaker, "batch"),
    "evaluations": (Experiment, "_evaluate"),
    "checkpoints": (crmatch.runs.run, "save_checkpoint"),
}
SIDE = 1024
WAITING: dict[str, dict[str, str]] = {
    "torch's default": {},
    "`GOMP_SPINCOUNT=1000` (`crmatch` on a quiet machine)": {"GOMP_SPINCOUNT": "1000"},
    "`OMP_WAIT_POLICY=PASSIVE` (`crmatch` beside a busy process)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
"""How threads wait for each other -> environment."""
ROUNDS = 3


def parts(command: list[str]) -> tuple[float, dict[str, float]]:
    """Seconds of the whole command, and of its parts."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[name] += time.perf_counter() - began

        return call

    for name, (owner, attribute) in TIMED.items():
        setattr(owner, attribute, timed(name, getattr(owner, attribute)))
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import crmatch.runs.run"], check=True)  # this process has imported it already
    sys.argv = ["crmatch", *command]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        crmatch_command()
    total = time.perf_counter() - began
    seconds["steps"] -= seconds["batches"]  # which are made inside of a step
    seconds["start and end"] = total - sum(seconds.values())
    return total, seconds


def median_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def prepare(setting_name: str, data_dir: Path, minutes: float) -> Training:
    """A run at its first step with images of the full size."""
    setting = parse_setting(setting_name, data_dir)
    spec = replace(recipe(setting, "crmatch", "quick"), **{"data.image_size": quick_image_size(setting, minutes)})
    spec = replace(spec, **{"plan.start_size": quick_start_size(spec, minutes)})
    training = Experiment(spec, *load_run_data(spec, setting, data_dir), choose_runtime()).training()
    training.step = spec.plan.start_steps(training.total_steps)
    return training


def beside_busy_process(command: list[str]) -> list[tuple[str, float, float]]:
    """(how threads wait, milliseconds per step alone, beside a busy process), medians over rounds."""
    found: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, variables in WAITING.items():
            for busy in (False, True):
                other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
                try:
                    clean = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_"))}
                    answer = subprocess.run(
                        [*command, "--step-only"], check=True, capture_output=True, text=True, env={**clean, **variables}
                    )
                finally:
                    if other is not None:
                        other.kill()
                        other.wait()
                found[name, busy].append(float(answer.stdout))
    medians = {key: 1e3 * statistics.median(times) for key, times in found.items()}
    return [(name, medians[name, False], medians[name, True]) for name in WAITING]


def rates(training: Training) -> list[tuple[str, float, float]]:
    """(what, GFLOP, seconds) of a step, of its convolutions alone and of a matrix product."""
    with FlopCounterMode(display=False) as counter:
        training.take_step()
    work = counter.get_total_flops() / 1e9
    matrix = torch.randn(SIDE, SIDE)
    return [
        ("a step", work, median_seconds(training.take_step)),
        ("its convolutions", work, median_seconds(kernels_of(training.take_step))),
        (f"matrix product of {SIDE} x {SIDE}", 2 * SIDE**3 / 1e9, median_seconds(lambda: matrix @ matrix, 100)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("setting")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--step-only", action="store_true", help="print the seconds of a step")
    chosen = parser.parse_args()
    training = prepare(chosen.setting, chosen.data_dir, chosen.minutes)
    if chosen.step_only:
        print(median_seconds(training.take_step, 50))
        return
    print(f"| {chosen.setting} | GFLOP | ms | GFLOPS |\n| --- | --- | --- | --- |")
    for what, work, duration in rates(training):
        print(f"| {what} | {work:.1f} | {duration * 1e3:.1f} | {work / duration:.0f} |")
    length = ["--minutes", str(chosen.minutes)] if chosen.minutes else []
    print(f"\n| {chosen.setting} | ms, alone | beside a busy process | ratio |\n| --- | --- | --- | --- |")
    for name, alone, beside in beside_busy_process([sys.executable, *sys.argv]):
        print(f"| {name} | {alone:.1f} | {beside:.1f} | {beside / alone:.1f} |")
    with tempfile.TemporaryDirectory() as out:
        places = ["--recipe", "quick", "--data-dir", str(chosen.data_dir), "--out", out, *length]
        total, seconds = parts(["train", chosen.setting, *places])
    print(f"\n| {chosen.setting} | seconds | share |\n| --- | --- | --- |")
    for name in ("steps", "batches", "evaluations", "checkpoints", "start and end"):
        print(f"| {name} | {seconds[name]:.1f} | {100 * seconds[name] / total:.1f} % |")
    print(f"| all | {total:.1f} | |")


if __name__ == "__main__":
    main()
