#!/usr/bin/env python3
"""Cost of a step of every method, compared with supervised-only on the same number of images.

    python benchmarks/method_cost.py

Measures forward passes, images, time and memory of steps of the recipe `quick` on digits@4. Supervised-only processes in one
pass as many images as all passes of the method together. The two take turns, and the result is the ratio of their median
times. Memory is the growth of the peak over five steps, each measured in its own process. Writes
docs/results/method-cost.json; benchmarks/accuracy.py shows its values next to the errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from accuracy import spec_of

from crmatch.data.settings import parse_setting
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, replace

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
SETTING = "digits@4"
ROUNDS, STEPS = 9, 2
KIBI = 1024


def start(spec: RunSpec) -> Any:
    """A run of `spec` at the start of its last quarter, when methods with several stages use all their terms."""
    from crmatch.runs.experiment import Experiment, load_run_data
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime

    training = Experiment(spec, *load_run_data(spec, parse_setting(SETTING)), choose_runtime(Execution("cpu"))).training()
    training.step = 3 * training.total_steps // 4
    return training


def passes_of(training: Any) -> list[int]:
    """Number of images in each forward pass of one step, of the network and of its EMA."""
    sizes: list[int] = []
    hooks = [
        network.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
        for network in (training.network, training.ema.network)
    ]
    training.take_step()
    for hook in hooks:
        hook.remove()
    return sizes


def counterpart(images: int) -> RunSpec:
    """Supervised-only on `images` labeled images per step."""
    return replace(recipe(parse_setting(SETTING), "supervised", "quick"), **{"plan.labeled_batch_size": images})


def peak_growth(method: str, images: int) -> int:
    """Growth of the peak memory of a new process over five steps, in bytes: of `method`, or of supervised-only on `images`."""
    command = [sys.executable, __file__, "--memory-of", method, "--images", str(images)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak_growth(method: str, images: int) -> None:
    training = start(counterpart(images) if images else spec_of(parse_setting(SETTING), method))
    before = _status("VmRSS")
    for _ in range(5):
        training.take_step()
    print((_status("VmHWM") - before) * KIBI)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(method: str) -> dict[str, Any]:
    training = start(spec_of(parse_setting(SETTING), method))
    passes = passes_of(training)
    supervised = start(counterpart(sum(passes)))
    seconds: dict[str, list[float]] = {"method": [], "supervised": []}
    for _ in range(ROUNDS):
        for name, contender in (("method", training), ("supervised", supervised)):
            began = time.perf_counter()
            for _ in range(STEPS):
                contender.take_step()
            seconds[name].append((time.perf_counter() - began) / STEPS)
    of_method, of_supervised = (statistics.median(values[1:]) for values in seconds.values())
    memory, baseline = peak_growth(method, 0), peak_growth(method, sum(passes))
    return {
        "passes": passes,
        "milliseconds": round(1000 * of_method, 1),
        "time_ratio": round(of_method / of_supervised, 3),
        "mebibytes": round(memory / KIBI**2),
        "memory_ratio": round(memory / baseline, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--methods",
        help="measure only these, separated by commas (default: all methods, and CR-Match with each confidence rule)",
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--images", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print_peak_growth(options.memory_of, options.images)
        return
    from crmatch.methods import METHODS, Preset
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime, describe_machine

    presets = [f"crmatch+{name}" for name, entry in METHODS.items() if isinstance(entry, Preset)]
    methods = options.methods.split(",") if options.methods else [*METHODS, "fixmatch+ctaugment", *presets]
    file = RESULTS / "method-cost.json"
    costs = json.loads(file.read_text())["costs"] if options.methods and file.exists() else {}
    for method in methods:
        costs[method] = measure(method)
        print(method, costs[method])
    machine = describe_machine(choose_runtime(Execution("cpu")))
    content = {"command": "python benchmarks/method_cost.py", "machine": machine, "costs": costs}
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
