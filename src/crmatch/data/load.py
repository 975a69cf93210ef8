"""Data sets by name: the entry point through which the images of a run are loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from crmatch.data.folder.scan import LEAVE_OUT, join_names, label_lines
from crmatch.data.images import LEFT_OUT, UNLABELED, DataSet, ImageSet, resize
from crmatch.data.official.catalog import CATALOG
from crmatch.data.official.fetch import READERS, fetch, require_set
from crmatch.data.own_sets import own_arrays
from crmatch.data.packed import Arrays, Rows, packed_path, read_packed
from crmatch.data.settings import default_data_dir
from crmatch.data.splits import Split
from crmatch.errors import DataError

logger = logging.getLogger(__name__)


def load_data(name: str, data_dir: Path | None = None, image_size: int | None = None, code: str | None = None) -> DataSet:
    """Load the packed set `name`, or the set that a function makes (`code`), resized to `image_size` pixels if it is given."""
    path = packed_path(name, data_dir or default_data_dir())
    data = _from_arrays(path, _read(name, path)) if code is None else _from_arrays(Path(name), own_arrays(code))
    if image_size is not None:
        train, test = _resized(data.train, image_size), data.test and _resized(data.test, image_size)
        data = data._replace(train=train, test=test)
    return data


def add_labels(data: DataSet, split: Split, file: Path) -> tuple[DataSet, Split]:
    """Add the labels of a CSV file (`path,label`; a path is the number of a training image) to the data and its split.

    The file's labels override those of the data, and the images it lists become labeled ones; `-` leaves an image out.
    """
    train = data.train
    number = {LEAVE_OUT: LEFT_OUT, **{name: label for label, name in enumerate(train.class_names)}}
    labels, is_labeled = train.labels.clone(), torch.zeros(len(train), dtype=torch.bool)
    is_labeled[split.labeled] = True
    for path, label in label_lines(file):
        if not label:
            continue
        if not (path.isascii() and path.isdigit() and len(path) < 20 and int(path) < len(train)):
            raise DataError(
                f"{file} lists {path!r}, which is not a training image.\n"
                f"For a data set, path is the number of a training image, 0..{len(train) - 1}."
            )
        if label not in number:
            raise DataError(f"{file} labels {path} as {label!r}.\nThe classes are: {join_names(number, 20)}")
        labels[int(path)] = number[label]
        is_labeled[int(path)] = label != LEAVE_OUT
    labeled = is_labeled.nonzero().squeeze(1)
    unlabeled = split.unlabeled
    if not torch.isin(split.labeled, split.unlabeled).any():  # labeled images are not used as unlabeled ones
        unlabeled = unlabeled[~is_labeled[unlabeled]]
    unlabeled = unlabeled[labels[unlabeled] != LEFT_OUT]
    train = ImageSet(train.images, labels, train.class_names)
    return data._replace(train=train), Split(labeled[labels[labeled].argsort(stable=True)], unlabeled)


def _resized(part: ImageSet, size: int) -> ImageSet:
    return ImageSet(resize(part.images, size), part.labels, part.class_names)


def _read(name: str, path: Path) -> Arrays:
    """Read a packed set. One that comes with a package is packed first, or used without a copy if it cannot be written."""
    require_set(name, path.parent)
    if not path.is_file():
        try:
            fetch(name, path.parent)
        except DataError as error:
            logger.info("%s is not copied to the data directory: %s", name, error)
            entry = CATALOG[name]
            return {key: array for key, array in READERS[entry.reader]([], entry).items() if not isinstance(array, Rows)}
    return read_packed(path)


def _from_arrays(path: Path, arrays: Arrays) -> DataSet:
    names = tuple(str(name) for name in arrays["class_names"].tolist())
    train = _image_set(path, arrays, "train", names)
    if "unlabeled_images" in arrays:
        extra = torch.from_numpy(arrays["unlabeled_images"]).permute(0, 3, 1, 2)
        unknown = torch.full((len(extra),), UNLABELED)
        train = ImageSet(torch.cat([train.images, extra]), torch.cat([train.labels, unknown]), names)
    folds = torch.from_numpy(arrays["folds"].astype(np.int64)) if "folds" in arrays else None
    return DataSet(train, _image_set(path, arrays, "test", names) if "test_images" in arrays else None, folds)


def _image_set(path: Path, arrays: Arrays, part: str, names: tuple[str, ...]) -> ImageSet:
    images = torch.from_numpy(arrays[f"{part}_images"]).permute(0, 3, 1, 2)
    labels = torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64))
    try:
        if (labels < UNLABELED).any():
            raise DataError(f"labels begin at {int(labels.min())}.\nUse {UNLABELED} for unlabeled images.")
        return ImageSet(images, labels, names)
    except DataError as error:
        raise DataError(f"{path}, {part} part: {error}") from error
