"""The packed format: one `<name>.npz` per data set, every array checked while it is read. Imports no torch.

Keys: `train_images` uint8 (N, H, W, C), `train_labels`, `test_images`, `test_labels`; optional `unlabeled_images`,
`folds`, `class_names`.
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from crmatch.errors import DataError

REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")
Arrays = dict[str, np.ndarray[Any, Any]]
_BROKEN = (
    OSError, ValueError, EOFError, KeyError, NotImplementedError, MemoryError, SyntaxError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


def packed_path(name: str, data_dir: Path) -> Path:
    """Where the packed set `name` lies."""
    return data_dir / f"{name}.npz"


def read_packed(path: Path) -> Arrays:
    """The arrays of a packed set, types and shapes checked; `class_names` are added where the file has none.

    Raises:
        DataError: the file is missing, damaged or not a packed set.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [key for key in REQUIRED if key not in archive]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}.\nA packed set needs {', '.join(REQUIRED)}.")
            arrays: Arrays = {key: archive[key] for key in archive}
    except DataError:
        raise
    except _BROKEN as error:
        raise _unreadable(path, error) from error
    for key, array in arrays.items():
        if key.endswith("_images") and (array.dtype != np.uint8 or array.ndim != 4):
            raise DataError(f"{key} of {path} must be uint8 (N, H, W, C), found {array.dtype} {array.shape}.")
        if key.endswith("_labels") and (array.dtype.kind not in "iu" or array.ndim != 1 or not array.size):
            raise DataError(f"{key} of {path} must be a list of integers, found {array.dtype} {array.shape}.")
    if "class_names" not in arrays:
        arrays["class_names"] = np.array([str(label) for label in range(int(arrays["train_labels"].max()) + 1)])
    return arrays


def packed_image_shape(path: Path) -> tuple[int, int, int]:
    """(height, width, channels) of a packed set, read from a header of a few bytes."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("train_images.npy") as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape = read(member)[0]
    except _BROKEN as error:
        raise _unreadable(path, error) from error
    if len(shape) != 4:
        raise DataError(f"train_images of {path} has shape {shape}.\nA packed set stores images as (N, H, W, C).")
    return int(shape[1]), int(shape[2]), int(shape[3])


def _unreadable(path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        found = sorted(file.stem for file in path.parent.glob("*.npz")) or ["no packed set"]
        return DataError(f"there is no {path.name} in {path.parent}.\nFound there: {', '.join(found)}")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"{path} cannot be read as a packed set: {reason}\nReplace the file: it is damaged or no .npz.")
