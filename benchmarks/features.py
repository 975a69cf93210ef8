#!/usr/bin/env python3
"""Computing and storing features against the network alone in a bare loop; needs two quiet cores and five minutes.

    python benchmarks/features.py            # 10,000 pictures of 96 pixels, writes docs/results/features.md

Both sides take turns in blocks of 1,000 pictures, so that other load of the machine hits both.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from crmatch.augment.batches import Normalizer
from crmatch.data.settings import parse_setting
from crmatch.networks.pretrained.inference import feature_function
from crmatch.networks.pretrained.load import load_body
from crmatch.runs.features import BLOCK, FeatureStore
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace

PICTURES, TURN, SIZE = 10_000, 1_000, 96
PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "features.md"


def main() -> None:
    device = torch.device("cpu")
    spec = replace(recipe(parse_setting("cifar10@4"), "crmatch", "head"), **{"data.image_size": SIZE})
    images = torch.randint(0, 256, (PICTURES, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    network = feature_function(load_body("efficientnet-lite0").module, SIZE, device)
    normalize = Normalizer(list(spec.data.mean), list(spec.data.std), torch.float32, device, torch.contiguous_format)
    ready = normalize(images[:BLOCK])
    network.compute(ready)  # the first pass is slower
    seconds: dict[str, float] = {"bare": 0.0, "none": 0.0, "weak0": 0.0, "strong0": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, PICTURES, TURN):
            store = FeatureStore(spec, images[start : start + TURN], Path(folder))
            for what in seconds:
                began = time.perf_counter()
                if what == "bare":
                    with ThreadPoolExecutor(network.calls) as threads:
                        list(
                            threads.map(network.compute, [ready[: min(BLOCK, TURN - first)] for first in range(0, TURN, BLOCK)])
                        )
                else:
                    store.compute(what, network, normalize, device, lambda count: None)
                seconds[what] += time.perf_counter() - began
    names = {"none": "unaugmented", "weak0": "weak views", "strong0": "strong views"}
    rows = [f"| {names[what]} | {seconds[what]:.1f} | {seconds[what] / seconds['bare']:.2f} |" for what in names]
    mixed = (seconds["none"] + 2 * seconds["weak0"] + 4 * seconds["strong0"]) / 7 / seconds["bare"]
    PAGE.write_text(
        "# Computing features\n\n"
        f"Seconds to augment, compute and store the features of {PICTURES:,} pictures of {SIZE} pixels with EfficientNet-Lite0 "
        f"({torch.get_num_threads()} threads), and their ratio to the network alone in a bare loop "
        f"({seconds['bare']:.1f} s). Made by `python benchmarks/features.py`.\n\n"
        "| views | seconds | ratio |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n\n"
        f"A training set has one unaugmented, two weak and four strong views of each picture: {mixed:.2f} times.\n"
    )
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
