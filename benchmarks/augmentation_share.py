#!/usr/bin/env python3
"""What share of a `quick` training step of CR-Match on color images augmentation takes.

    python benchmarks/augmentation_share.py

Random 32x32 color images brought to 16x16, two threads; a step and its batch alone take turns. Writes
docs/results/augmentation-share.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from crmatch.data.packed import write_packed
from crmatch.data.settings import parse_setting
from crmatch.experiment import Experiment, load_run_data
from crmatch.recipes import recipe
from crmatch.training.runtime import choose_runtime

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
ROUNDS = 30


def main() -> None:
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        images, labels = random.integers(0, 256, (2000, 32, 32, 3), dtype=np.uint8), np.arange(2000) % 10
        arrays: dict[str, Any] = {
            "train_images": images,
            "train_labels": labels,
            "test_images": images[:100],
            "test_labels": labels[:100],
        }
        write_packed(Path(folder) / "noise.npz", {**arrays, "class_names": np.array([str(label) for label in range(10)])})
        setting = parse_setting("noise@25", Path(folder))
        spec = recipe(setting)
        training = Experiment(spec, *load_run_data(spec, setting, Path(folder)), choose_runtime("cpu")).training()
    batches, steps = [], []
    for round_number in range(ROUNDS + 3):
        started = time.perf_counter()
        training.batches.batch(round_number)
        middle = time.perf_counter()
        training.take_step()
        if round_number >= 3:
            batches.append(middle - started)
            steps.append(time.perf_counter() - middle)
    shares = sorted(100 * batch / step for batch, step in zip(batches, steps, strict=True))
    low, middle_share, high = statistics.quantiles(shares, n=4)
    step_ms, batch_ms = 1000 * statistics.median(steps), 1000 * statistics.median(batches)
    text = f"""# Augmentation in a training step

A `quick` step of CR-Match on color images takes {step_ms:.0f} ms (median of {ROUNDS}), of which making the batch (gathering,
weak and strong augmentation of 240 images, normalization) takes {batch_ms:.1f} ms: {middle_share:.1f} %
(quartiles {low:.1f} to {high:.1f}). Made by `python benchmarks/augmentation_share.py`.
"""
    (RESULTS / "augmentation-share.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
