#!/usr/bin/env python3
"""The share of augmentation in a `quick` training step of CR-Match on color images.

    python benchmarks/augmentation_share.py

The images are random, 32x32 pixels, resized to 16x16; torch uses its default number of threads. Making a batch and taking a
step alternate. Writes docs/results/augmentation-share.md.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from turns import take_turns, timed

from crmatch.data.settings import parse_setting
from crmatch.runs.experiment import Experiment, load_run_data
from crmatch.spec.recipes import recipe
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime
from training import noise

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
ROUNDS = 30


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        noise(Path(folder), count=2000)
        setting = parse_setting("noise@25", Path(folder))
        spec = recipe(setting)
        training = Experiment(spec, *load_run_data(spec, setting, Path(folder)), choose_runtime(Execution("cpu"))).training()
    seconds = take_turns(
        {"batch": timed(lambda: training.batches.batch(training.step)), "step": timed(training.take_step)}, ROUNDS, warmup=3
    )
    batches, steps = seconds["batch"], seconds["step"]
    shares = [100 * batch / step for batch, step in zip(batches, steps, strict=True)]
    low, middle_share, high = statistics.quantiles(shares, n=4)
    step_ms, batch_ms = 1000 * statistics.median(steps), 1000 * statistics.median(batches)
    text = f"""# Augmentation in a training step

A `quick` step of CR-Match on color images takes {step_ms:.0f} ms (median of {ROUNDS}). Making its batch (gathering,
weak and strong augmentation of 240 images, normalization) takes {batch_ms:.1f} ms, which is {middle_share:.1f} % of the step
(quartiles {low:.1f} to {high:.1f}). Made by `python benchmarks/augmentation_share.py`.
"""
    (RESULTS / "augmentation-share.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
