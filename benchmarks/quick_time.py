#!/usr/bin/env python3
"""Where the time of `crmatch train SETTING` goes, and how fast its convolutions are compared with a matrix product.

    python benchmarks/quick_time.py svhn_small@25 --data-dir DIR     # three minutes on two quiet cores; prints two tables

Evaluations, checkpoints and batches are timed inside of the command; what is left besides the steps is start-up and end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
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
from crmatch.spec.recipes import recipe
from crmatch.training.loop import Training
from crmatch.training.runtime import choose_runtime

TIMED = {
    "steps": (Training, "take_step"),
    "batches": (BatchMaker, "batch"),
    "evaluations": (Experiment, "_evaluate"),
    "checkpoints": (crmatch.runs.run, "save_checkpoint"),
}
SIDE = 1024


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


def rates(setting_name: str, data_dir: Path) -> list[tuple[str, float, float]]:
    """(what, GFLOP, seconds) of a step, of its convolutions alone and of a matrix product."""
    setting = parse_setting(setting_name, data_dir)
    spec = recipe(setting, "crmatch", "quick")
    training = Experiment(spec, *load_run_data(spec, setting, data_dir), choose_runtime()).training()
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
    chosen = parser.parse_args()
    print(f"| {chosen.setting} | GFLOP | ms | GFLOPS |\n| --- | --- | --- | --- |")
    for what, work, duration in rates(chosen.setting, chosen.data_dir):
        print(f"| {what} | {work:.1f} | {duration * 1e3:.1f} | {work / duration:.0f} |")
    with tempfile.TemporaryDirectory() as out:
        places = ["--recipe", "quick", "--data-dir", str(chosen.data_dir), "--out", out]
        total, seconds = parts(["train", chosen.setting, *places])
    print(f"\n| {chosen.setting} | seconds | share |\n| --- | --- | --- |")
    for name in ("steps", "batches", "evaluations", "checkpoints", "start and end"):
        print(f"| {name} | {seconds[name]:.1f} | {100 * seconds[name] / total:.1f} % |")
    print(f"| all | {total:.1f} | |")


if __name__ == "__main__":
    main()
