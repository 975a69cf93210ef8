"""`make soak`: long runs of tiny networks; memory, open files and time per step must stay what they are after 1,000 steps.

Every run has a process of its own, which prints its samples as JSON. Figures go to docs/results/survival.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from survival_page import write_table

from conftest import SMALLEST, exit_code, options
from finished import stripes_in

RUNS = {
    "crmatch": ("crmatch", {"method.rotation_images": 2}),
    "crmatch with CTAugment": ("crmatch", {"method.rotation_images": 2, "augmentation.policy": "ctaugment"}),
    "label_propagation": ("label_propagation", {}),
    "featmatch": ("featmatch", {}),
}
KEYS = {**SMALLEST, "plan.evaluate_every": 100, "plan.log_every": 50, "plan.checkpoint_every": 250}
EVERY, EARLY, WINDOW = 100, 1000, 1000
MOST = {"MiB": 1.02, "open files": 1.0, "ms per step": 1.25}
"""Largest allowed ratio of a later to an earlier median."""


def sample(began: float) -> dict[str, float]:
    """Memory and open files of this process, and its processor time per step since `began`.

    Memory is the proportional set size (PSS) without mapped files: the share of libraries depends on what other processes run.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss = next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    files, seconds = len(os.listdir("/proc/self/fd")), time.process_time() - began
    return {"MiB": pss / 1024, "open files": files, "ms per step": seconds * 1e3 / EVERY}


def train(name: str, steps: int, folder: Path) -> list[dict[str, float]]:
    """Train here; a sample for every `EVERY` steps."""
    from crmatch.training.loop import Training

    method, keys = RUNS[name]
    places = ["--data-dir", stripes_in(folder / "data", per_class=8, side=8, channels=1), "--out", folder / "runs"]
    command = ["train", "stripes@2", "--recipe=quick", "--method", method, *places, "--tensorboard", "--json"]
    samples, began, take_step = list[dict[str, float]](), time.process_time(), Training.take_step

    def sampled(training: Training) -> Any:
        nonlocal began
        if training.step and training.step % EVERY == 0:
            samples.append(sample(began))
            began = time.process_time()
        return take_step(training)

    Training.take_step = sampled  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()):
        code = exit_code([*command, *options({**KEYS, **keys, "plan.steps": steps})])
    assert code == 0, code
    return samples


def medians(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Earlier and later median of each value."""
    parts = samples[EARLY // EVERY : (EARLY + WINDOW) // EVERY], samples[-WINDOW // EVERY :]
    early, late = ({key: statistics.median(one[key] for one in part) for key in MOST} for part in parts)
    return {key: (early[key], late[key]) for key in MOST}


def main() -> None:
    """Train all; a value that grew is an exit code of 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--only", choices=RUNS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if chosen.only:
            print(json.dumps(train(chosen.only, chosen.steps, Path(folder))))
            return
    began, problems = time.monotonic(), list[str]()
    rows: list[tuple[object, ...]] = [("run", "steps", *(f"{key}, earlier and later" for key in MOST))]
    for name in RUNS:
        arguments = [__file__, "--steps", str(chosen.steps), "--only", name]
        out = subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE).stdout
        found = medians(json.loads(out))
        rows.append((name, chosen.steps, *(f"{early:.4g}, {late:.4g}" for early, late in found.values())))
        problems += [f"{name}: {key} {found[key]}" for key in MOST if found[key][1] > MOST[key] * found[key][0]]
        print(*rows[-1], flush=True)
    if problems:
        sys.exit("\n".join(problems))
    write_table("Long runs", "make soak", began, rows)


if __name__ == "__main__":
    main()
