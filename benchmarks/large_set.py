#!/usr/bin/env python3
"""Training on a data set of several GiB: memory and step time compared with a small set.

    python benchmarks/large_set.py --gibibytes 4

Writes two packed sets of random 32x32 color images (a small one of 2,000 images and a large one), trains `quick` on
each in its own process, in turns, and writes docs/results/large-set.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
SIDE = 32
SMALL = 2000
STEPS = 20


def write_set(path: Path, images: int) -> None:
    """Write a packed set of random pixels in chunks."""
    from crmatch.data.packed import Rows, write_packed

    random = np.random.default_rng(0)
    labels = np.arange(images) % 10

    def pieces() -> Any:
        for start in range(0, images, 5000):
            yield random.integers(0, 256, (min(5000, images - start), SIDE, SIDE, 3), dtype=np.uint8)

    test = random.integers(0, 256, (500, SIDE, SIDE, 3), dtype=np.uint8)
    rows = Rows((images, SIDE, SIDE, 3), pieces())
    arrays: dict[str, Any] = {"train_images": rows, "train_labels": labels, "test_images": test, "test_labels": labels[:500]}
    write_packed(path, {**arrays, "class_names": np.array([str(label) for label in range(10)])})


def memory() -> dict[str, int]:
    """Anonymous and file-backed resident memory of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return {"anonymous": values["RssAnon"], "file": values["RssFile"]}


def measure(folder: Path, name: str) -> None:
    """Train a few steps on one set and print seconds per step and memory; runs in a child process."""
    import time

    from crmatch.data.settings import parse_setting
    from crmatch.runs.experiment import Experiment, load_run_data
    from crmatch.spec.recipes import recipe
    from crmatch.spec.run_spec import replace
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime

    setting = parse_setting(f"{name}@25", folder)
    spec = replace(recipe(setting), **{"data.image_size": SIDE})
    started = time.perf_counter()
    training = Experiment(spec, *load_run_data(spec, setting, folder), choose_runtime(Execution("cpu"))).training()
    ready = time.perf_counter() - started
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        training.take_step()
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"name": name, "ready": ready, "step": statistics.median(seconds), **memory()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gibibytes", type=float, default=4.0, help="pixels of the large set in GiB")
    parser.add_argument("--rounds", type=int, default=2, help="processes per set")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(Path(options.child[0]), options.child[1])
        return
    images = int(options.gibibytes * 2**30 / (SIDE * SIDE * 3))
    found: dict[str, list[dict[str, Any]]] = {"small": [], "large": []}
    with tempfile.TemporaryDirectory(prefix="crmatch-large-") as folder:
        write_set(Path(folder) / "small.npz", SMALL)
        write_set(Path(folder) / "large.npz", images)
        for _ in range(options.rounds):
            for name, rows in found.items():
                command = [sys.executable, __file__, "--child", folder, name]
                rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    columns = ("set", "images", "MiB of pixels", "s until ready", "s per step", "anonymous MiB", "mapped MiB")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, count in (("small", SMALL), ("large", images)):
        median = {key: statistics.median(row[key] for row in found[name]) for key in ("ready", "step", "anonymous", "file")}
        pixels = count * SIDE * SIDE * 3 / 2**20
        times = f"{median['ready']:.2f} | {median['step']:.3f}"
        memory_used = f"{median['anonymous'] / 1024:,.0f} | {median['file'] / 1024:,.0f}"
        lines.append(f"| {name} | {count:,} | {pixels:,.0f} | {times} | {memory_used} |")
    text = f"""# Training on a data set of several GiB

{STEPS} steps of CR-Match (`quick` at {SIDE}x{SIDE}) on packed sets that are memory-mapped; medians of {options.rounds}
processes each, in turns. Mapped memory is the file cache of the system, which frees it when other programs need memory.

{chr(10).join(lines)}

Made by `python benchmarks/large_set.py --gibibytes {options.gibibytes:g}`.
"""
    (RESULTS / "large-set.md").write_text(text)
    (RESULTS / "large-set.json").write_text(json.dumps(found, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
