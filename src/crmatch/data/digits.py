"""scikit-learn's digits: 1,797 real handwritten digits, 8x8 gray, brought to 16x16."""

from __future__ import annotations

import importlib.util
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from crmatch.data.images import DataSet, ImageSet, resize
from crmatch.errors import DataError
from crmatch.randomness import generator

SIDE = 16
TEST_IMAGES = 500


def read_digits() -> DataSet:
    """The digits with gray levels 0..16 spread over 0..255, and 500 test images chosen by a fixed seed."""
    table = _read_table()
    pixels = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = resize(torch.from_numpy(pixels)[:, None], SIDE)
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    names = tuple(str(digit) for digit in range(10))
    order = torch.randperm(len(images), generator=generator(0, "digits/test"))
    test, train = order[:TEST_IMAGES].sort().values, order[TEST_IMAGES:].sort().values
    return DataSet(ImageSet(images[train], labels[train], names), ImageSet(images[test], labels[test], names))


def _read_table() -> NDArray[np.float64]:
    """The file that `sklearn.datasets.load_digits` reads; importing scikit-learn for it takes a second of every start."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        return np.loadtxt(path, delimiter=",")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.\nInstall scikit-learn again.") from error
