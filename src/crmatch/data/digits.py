"""scikit-learn's digits: 1,797 real handwritten digits, 8x8 gray, brought to 16x16."""

from __future__ import annotations

import numpy as np
import torch

from crmatch.data.images import DataSet, ImageSet, resize
from crmatch.randomness import generator

SIDE = 16
TEST_IMAGES = 500


def read_digits() -> DataSet:
    """The digits with gray levels 0..16 spread over 0..255, and 500 test images chosen by a fixed seed."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    images = resize(torch.from_numpy(pixels)[:, None], SIDE)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    names = tuple(str(name) for name in bunch.target_names)
    order = torch.randperm(len(images), generator=generator(0, "digits/test"))
    test, train = order[:TEST_IMAGES].sort().values, order[TEST_IMAGES:].sort().values
    return DataSet(ImageSet(images[train], labels[train], names), ImageSet(images[test], labels[test], names))
