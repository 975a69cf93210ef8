#!/usr/bin/env python3
"""Speed of `crmatch predict`, compared with the forward pass of the same network on pixels in memory.

    python benchmarks/predict.py

Uses 10,000 PNG pictures of 32x32 pixels. Both take turns in one process on all cores. Writes docs/results/predict.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from crmatch.atomic_files import checksum
from crmatch.networks.build import build_network
from crmatch.networks.config import NETWORKS, WideResNetConfig
from crmatch.predict.model import Model, build_model
from crmatch.predict.picture_files import BATCH, predict_files
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
SIDE, CLASSES = 32, 10
CHOSEN: dict[str, Any] = {
    "WRN-28-2 (the paper's)": NETWORKS["wrn-28-2"],
    "quick recipe": WideResNetConfig(filters=32, repeat=1, norm_momentum=0.1),
}


def untrained(network: Any) -> Model:
    """A model with random weights, built as if it were loaded from a run."""
    weights = safetensors.torch.save(build_network(network, channels=3, image_size=SIDE, classes=CLASSES).deployed_state())
    config = {
        "network": network.model_dump(mode="json"),
        "channels": 3,
        "image_size": SIDE,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "class_names": [str(label) for label in range(CLASSES)],
        "checksum": checksum(weights),
    }
    return build_model(weights, config)


def write_pictures(folder: Path, count: int) -> list[Path]:
    """Write smooth random pictures, which compress about as well as photographs."""
    random = np.random.default_rng(0)
    paths = [folder / f"{number:05d}.png" for number in range(count)]
    for path in paths:
        coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path)
    return paths


def seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=10_000, help="number of pictures")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    options = parser.parse_args()
    choose_runtime(Execution("cpu"))
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        paths = write_pictures(Path(folder), options.pictures)
        pixels = np.stack([np.asarray(Image.open(path)) for path in paths])
        batches = torch.split(torch.from_numpy(pixels).permute(0, 3, 1, 2), BATCH)
        for name, network in CHOSEN.items():
            model = untrained(network)
            model.predict_probabilities(batches[0])
            bare, files = [], []
            for _ in range(options.rounds):
                bare.append(seconds(lambda: [model.predict_probabilities(batch) for batch in batches]))  # noqa: B023
                files.append(seconds(lambda: predict_files(model, paths)))  # noqa: B023
            speeds = [options.pictures / statistics.median(times) for times in (bare, files)]
            share = statistics.median(one / other for one, other in zip(bare, files, strict=True))
            lines.append(f"| {name} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {100 * share:.0f} % |")
            print(lines[-1], flush=True)
    table = "\n".join(
        ["| network | forward pass only, images/s | predict, pictures/s | relative speed |", "|---|---|---|---|", *lines]
    )
    about = (
        f"{options.pictures:,} PNG pictures of {SIDE}x{SIDE} pixels, decoded by workers while the network computes, compared\n"
        f"with the network alone on pixels in memory, in the same batches of {BATCH}. Medians of {options.rounds} rounds in\n"
        f"turns, {torch.get_num_threads()} threads. Made by `python benchmarks/predict.py`."
    )
    (RESULTS / "predict.md").write_text(f"# Speed of crmatch predict\n\n{about}\n\n{table}\n")


if __name__ == "__main__":
    main()
