#!/usr/bin/env python3
"""Make a folder of photos for `make demo-photos`, without internet.

    python examples/demo_photos.py demo-photos

The photos are crops of three pictures that come with scikit-learn and matplotlib: a temple, a flower and a portrait. Three
crops of each are labeled, 201 in all are unlabeled, and 90 are for testing. Test crops come from the right part of each
picture, all others from the left part, so that no pixel is in both.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

LABELED, UNLABELED, TEST = 3, 67, 30
"""Crops of each class."""


def main(folder: Path) -> None:
    """Write the photos."""
    temple, flower = (Image.fromarray(picture) for picture in load_sample_images().images)
    portrait = Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg")
    random = np.random.default_rng(0)
    number = 0
    for name, picture in {"temple": temple, "flower": flower, "portrait": portrait}.items():
        border = int(0.65 * picture.width)
        left, right = picture.crop((0, 0, border, picture.height)), picture.crop((border, 0, picture.width, picture.height))
        parts = [("labeled", left, LABELED), ("unlabeled", left, UNLABELED), ("test", right, TEST)]
        for part, source, count in parts:
            place = folder / part if part == "unlabeled" else folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            for _ in range(count):
                side = int(random.integers(90, min(source.size)))
                x, y = (int(random.integers(0, length - side + 1)) for length in source.size)
                crop = source.crop((x, y, x + side, y + side)).resize((128, 128))
                crop.save(place / f"{number:03}.jpg", quality=90)  # the name of an unlabeled photo does not tell its class
                number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
