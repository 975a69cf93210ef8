"""scikit-learn's digits: 1,797 real handwritten digits, 8x8 gray, brought to 16x16.

Labels that people add to those of a setting: labels.csv whose paths are the numbers of training images.

Data sets by name: the one door through which images enter a run.
"""

from __future__ import annotations

import importlib.util
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from crmatch.data.folder.scan import join_names, label_lines
from crmatch.data.images import UNLABELED, DataSet, ImageSet, resize
from crmatch.data.packed import Arrays, packed_path, read_packed
from crmatch.data.settings import default_data_dir
from crmatch.data.splits import Split
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


def add_labels(data: DataSet, split: Split, file: Path) -> tuple[DataSet, Split]:
    """The data with the labels of `file` (`path,label`; a path is the number of a training image), and its split.

    What the file says wins over the label that the data has; images it names count as labeled from now on.
    """
    train = data.train
    number = {name: label for label, name in enumerate(train.class_names)}
    labels, added = train.labels.clone(), []
    for path, label in label_lines(file):
        if not label:
            continue
        if not (path.isascii() and path.isdigit() and int(path) < len(train)):
            raise DataError(
                f"{file} names {path!r}, which is no training image.\n"
                f"For a data set, path is the number of a training image, 0..{len(train) - 1}."
            )
        if label not in number:
            raise DataError(f"{file} labels {path} as {label!r}.\nThe classes are: {join_names(number, 20)}")
        labels[int(path)] = number[label]
        added.append(int(path))
    is_labeled = torch.zeros(len(train), dtype=torch.bool)
    is_labeled[split.labeled] = True
    is_labeled[added] = True
    rows = is_labeled.nonzero().squeeze(1)
    was_shared = bool(torch.isin(split.labeled, split.unlabeled).any())
    rest = split.unlabeled if was_shared else split.unlabeled[~is_labeled[split.unlabeled]]
    more = ImageSet(train.images, labels, train.class_names)
    return data._replace(train=more), Split(rows[labels[rows].argsort(stable=True)], rest)


def load_data(name: str, data_dir: Path | None = None, image_size: int | None = None) -> DataSet:
    """The data set `name`, its images brought to `image_size` pixels where one is given."""
    if name == "digits":
        data = read_digits()
    else:
        path = packed_path(name, data_dir or default_data_dir())
        data = _from_arrays(path, read_packed(path))
    if image_size is None:
        return data
    test = _resized(data.test, image_size) if data.test else None
    return data._replace(train=_resized(data.train, image_size), test=test)


def _resized(part: ImageSet, size: int) -> ImageSet:
    return ImageSet(resize(part.images, size), part.labels, part.class_names)


def _from_arrays(path: Path, arrays: Arrays) -> DataSet:
    names = tuple(str(name) for name in arrays["class_names"].tolist())
    train = _image_set(path, arrays, "train", names)
    if "unlabeled_images" in arrays:
        extra = torch.from_numpy(arrays["unlabeled_images"]).permute(0, 3, 1, 2)
        unknown = torch.full((len(extra),), UNLABELED)
        train = ImageSet(torch.cat([train.images, extra]), torch.cat([train.labels, unknown]), names)
    folds = torch.from_numpy(arrays["folds"].astype(np.int64)) if "folds" in arrays else None
    return DataSet(train, _image_set(path, arrays, "test", names), folds)


def _image_set(path: Path, arrays: Arrays, part: str, names: tuple[str, ...]) -> ImageSet:
    images = torch.from_numpy(arrays[f"{part}_images"]).permute(0, 3, 1, 2)
    try:
        return ImageSet(images, torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64)), names)
    except DataError as error:
        raise DataError(f"{path}, {part} part: {error}") from error
