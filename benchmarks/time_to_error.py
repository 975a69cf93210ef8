#!/usr/bin/env python3
"""Test error over wall-clock time: our recipe `quick` against USB's own CR-Match, same images, labels and core, in turns.

    python benchmarks/time_to_error.py --data-dir DIR --minutes 5     # twenty minutes on two quiet cores

DIR has svhn_small.npz and cifar10_small.npz. Each setting has a core of its own, on which the programs run one after the other
with one thread; USB's loader processes share that core. USB runs twice: with its published configuration (64 + 448 images per
step, schedule of 2^20 steps), and with the best short one that its options allow (8 + 56 images, a schedule that ends with the
time, a shorter moving average). USB's time leaves out evaluation, ours includes it. Writes docs/results/time-to-error.json, .md
and .png; `--from-json` only writes page and figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from training import HERE, install_usb

RESULTS = HERE.parent / "docs" / "results"
SETTINGS = ("svhn_small@25", "cifar10_small@25")
SHORT = {"labeled_batch": 8, "ema": 0.99}
NEAR_CHANCE = 88.0
"""Errors above this may be chance, 90 % for ten classes, with 1,000 test images."""
Curve = list[list[float]]
"""Points (seconds, error in percent)."""


def on_core(core: int, command: Sequence[object]) -> str:
    """What a command prints that has one thread and one core."""
    pinned = ["taskset", "--cpu-list", str(core), *map(str, command)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(pinned, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def ours(core: int, setting: str, minutes: float, data_dir: Path) -> Curve:
    with tempfile.TemporaryDirectory() as out:
        command = ["train", setting, "--recipe", "quick", "--minutes", minutes, "--data-dir", data_dir, "--out", out]
        on_core(core, [sys.executable, "-m", "crmatch", *command])
        (curves,) = Path(out).rglob("metrics.jsonl")
        lines = [json.loads(line) for line in curves.read_text().splitlines()]
    return [[line["seconds"], line["error/ema"]] for line in lines if "error/ema" in line]


def usb(core: int, python: str, setting: str, minutes: float, data_dir: Path, **options: float) -> Curve:
    """USB's curve; the schedule of the short configuration has as many steps as fit into the time by a trial."""
    data = data_dir / f"{setting.partition('@')[0]}.npz"
    command = [python, str(HERE / "usb_on_cpu.py"), "curve", "--data", str(data), "--labeled", labeled(setting, data_dir)]
    command += [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]

    def points(minutes: float, count: int, *more: str) -> list[list[float]]:
        answer = on_core(core, [*command, "--minutes", minutes, "--points", count, *more])
        rows = [line.split() for line in answer.splitlines()]
        return [[float(value) for value in row] for row in rows if len(row) == 3 and row[1].isdigit()]

    more: tuple[str, ...] = ()
    if options:
        seconds, steps, _ = points(0.5, 1)[0]
        more = ("--steps", str(round(60 * minutes * steps / seconds)))
    return [[seconds, error] for seconds, _, error in points(minutes, 10, *more)]


def labeled(setting: str, data_dir: Path) -> str:
    """The labeled images of split 1, as JSON."""
    from crmatch.data.load import load_data
    from crmatch.data.splits import make_split

    name, _, labels = setting.partition("@")
    return json.dumps(make_split(load_data(name, data_dir, 32, None), int(labels), 1, "balanced", "remaining").labeled.tolist())


def first_below(curve: Curve, error: float) -> float | None:
    """Seconds after which the curve first has this error or less."""
    return next((seconds for seconds, found in curve if found <= error), None)


def page(results: dict[str, Any]) -> str:
    rows = []
    for setting, curves in results["curves"].items():
        for name, curve in curves.items():
            error = curve[-1][1]
            sooner = first_below(curves["crmatch quick"], error)
            reached = f"{sooner:.0f} s ({curve[-1][0] / sooner:.1f} times sooner)" if sooner else "not reached"
            if error >= NEAR_CHANCE:
                reached = "USB is still at chance"
            rows.append(
                f"| {setting} | {name} | {error:.1f} | {curve[-1][0]:.0f} | {reached if name.startswith('USB') else ''} |"
            )
    return f"""# Error over time, against USB

Test error of CR-Match after {results["minutes"]:g} minutes on one core, split 1: our recipe `quick`, and USB's own
code (semilearn 0.3.2) with the same images and labels. The last column says at which of our evaluations the error was
first as low as USB's final one. n = 1 split: differences of a few points may be chance.
Made by `python benchmarks/time_to_error.py --minutes {results["minutes"]:g}`.

| setting | program | final error % | seconds | ours has this error after |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

![Test error over time](time-to-error.png)
"""


def figure(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(1, len(results["curves"]), figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, (setting, curves) in zip(axes, results["curves"].items(), strict=True):
        for name, curve in curves.items():
            axis.plot(
                [seconds / 60 for seconds, _ in curve], [error for _, error in curve], marker="o", markersize=3, label=name
            )
        axis.set(title=setting, xlabel="minutes", ylim=(0, 100))
    axes[0].set_ylabel("test error %")
    axes[0].legend()
    drawing.savefig(RESULTS / "time-to-error.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--usb-venv", type=Path, default=HERE / ".usb-venv", help="venv of USB")
    parser.add_argument("--from-json", action="store_true", help="only write page and figure")
    options = parser.parse_args()
    stored = RESULTS / "time-to-error.json"
    if not options.from_json:
        cores = sorted(os.sched_getaffinity(0))[: len(SETTINGS)]
        if len(cores) < len(SETTINGS):
            parser.error(f"each of the {len(SETTINGS)} settings needs a core of its own, and {len(cores)} is here")
        python, minutes, folder = install_usb(options.usb_venv), options.minutes, options.data_dir

        def curves(core: int, setting: str) -> dict[str, Curve]:
            return {
                "crmatch quick": ours(core, setting, minutes, folder),
                "USB, short": usb(core, python, setting, minutes, folder, **SHORT),
                "USB, published": usb(core, python, setting, minutes, folder),
            }

        with ThreadPoolExecutor() as pool:
            found = pool.map(curves, cores, SETTINGS)
        results = {"minutes": minutes, "curves": dict(zip(SETTINGS, found, strict=True))}
        stored.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(stored.read_text())
    figure(results)
    (RESULTS / "time-to-error.md").write_text(page(results))
    print(page(results))


if __name__ == "__main__":
    main()
