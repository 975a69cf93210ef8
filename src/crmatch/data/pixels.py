"""Arrays of pictures in the layouts that people have them in. Imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from crmatch.data.square import SMALLEST_SIDE
from crmatch.errors import DataError


def as_pixels(images: Any, name: str = "images") -> NDArray[np.uint8]:
    """Pictures as uint8 (N, H, W, C), from a NumPy array or torch tensor (N, H, W, C), (N, C, H, W) or (N, H, W).

    The values are uint8, or floats from 0 to 1. Sides have at least 8 pixels, so 1 or 3 in second or last place are channels.
    """
    array = np.asarray(images)
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim == 4 and array.shape[3] not in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or not len(array) or array.shape[3] not in (1, 3) or min(array.shape[1:3]) < SMALLEST_SIDE:
        raise DataError(
            f"{name} of shape {np.shape(images)} cannot be used.\n"
            f"Give (N, H, W, C), (N, C, H, W) or (N, H, W) with 1 or 3 channels and sides of at least {SMALLEST_SIDE} pixels."
        )
    if array.dtype.kind == "f":
        if not (array.min() >= 0 and array.max() <= 1):
            found = f"{name} are floats from {array.min():g} to {array.max():g}"
            raise DataError(f"{found}.\nGive floats from 0 to 1, or uint8.")
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise DataError(f"{name} are {array.dtype}.\nGive uint8, or floats from 0 to 1.")
    return np.require(array, requirements="W")  # torch needs writable memory
