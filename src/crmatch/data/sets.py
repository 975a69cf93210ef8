"""Data sets by name: the one door through which images enter a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from crmatch.data.digits import read_digits
from crmatch.data.images import UNLABELED, DataSet, ImageSet, resize
from crmatch.data.packed import Arrays, packed_path, read_packed
from crmatch.data.settings import default_data_dir
from crmatch.errors import DataError


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
