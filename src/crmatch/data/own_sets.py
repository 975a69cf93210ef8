"""Data sets from outside the package: a function that returns images and labels. Imports no torch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crmatch.data.packed import Arrays
from crmatch.data.pixels import as_pixels
from crmatch.errors import DataError, RequestError
from crmatch.own_code import find, short_name

RETURNS = "It must return images, labels; or images, labels, test_images, test_labels"


@functools.cache
def own_arrays(code: str) -> Arrays:
    """The arrays of a packed set, from what the function returns: images and labels, of a test set, too, if there is one.

    Images are as in `as_pixels`. Labels are class names, or integers with -1 for unlabeled images.
    """
    name, make = short_name(code), find(code)
    if not callable(make):
        raise RequestError(f"{name} is a {type(make).__name__}, not a function.\n{RETURNS}.")
    parts = make()
    if not isinstance(parts, tuple) or len(parts) not in (2, 4):
        found = f"{len(parts)} values" if isinstance(parts, tuple) else f"a {type(parts).__name__}"
        raise DataError(f"{name} returned {found}.\n{RETURNS}.")
    images, labels = [as_pixels(part, name) for part in parts[::2]], [np.asarray(part) for part in parts[1::2]]
    for pictures, part in zip(images, labels, strict=True):
        if part.shape != (len(pictures),) or part.dtype.kind not in "iuUS":
            found = f"{len(pictures)} images with labels {part.dtype} of shape {part.shape}"
            raise DataError(f"{name} returned {found}.\nGive one integer or class name for each image; -1 means unlabeled.")
    is_text = labels[0].dtype.kind in "US"
    known = np.unique(labels[0] if is_text else labels[0][labels[0] >= 0])
    if not is_text and known.tolist() != list(range(len(known))):
        raise DataError(f"{name} returned the labels {known[:8].tolist()}.\nNumber the classes from 0 without gaps.")
    arrays: Arrays = {"class_names": known.astype(str)}
    for kind, pictures, values in zip(("train", "test"), images, labels, strict=False):
        arrays |= {f"{kind}_images": pictures, f"{kind}_labels": _numbers(values, known) if is_text else values}
    return arrays


def _numbers(names: NDArray[Any], known: NDArray[Any]) -> NDArray[np.int64]:
    """The number of each class name; unknown ones get a number that is refused when the set is made."""
    found = {name: number for number, name in enumerate(known.tolist())}
    return np.array([found.get(name, len(found)) for name in names.tolist()], np.int64)
