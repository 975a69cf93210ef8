"""Conversion of scikit-learn's X and y to the images and labels of a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from sklearn.utils.validation import column_or_1d
from torch import Tensor

from crmatch.data.folder.decode import choose_size, decode_image
from crmatch.data.folder.scan import join_names
from crmatch.data.folder.workers import decode_pictures
from crmatch.data.images import UNLABELED, resize
from crmatch.data.square import SMALLEST_SIDE
from crmatch.errors import DataError, RequestError

Array = NDArray[Any]
Files = list[str | Path] | list[Image.Image]


@dataclass(frozen=True)
class InputFormat:
    """How X is converted to images: determined in `fit`, used again in `predict`."""

    kind: Literal["files", "pictures", "features"]  # files or Pillow's pictures, arrays, or numbers without geometry
    side: int  # shorter side of the given images in pixels
    channels: int  # 1 or 3
    size: tuple[int, int] | None = None  # height and width of the pictures, if all had the same in an array
    image_shape: tuple[int, ...] | None = None  # (H, W[, C]) of a row of a two-dimensional X that holds pictures
    low: Array | None = None  # smallest value in `fit`, of each feature or of all pixels; None for uint8 and files
    high: Array | None = None  # largest value

    def images(self, X: Any, image_size: int) -> Tensor:
        """X as images uint8 (N, C, image_size, image_size)."""
        if are_files(X):
            if self.kind == "features" or self.low is not None:
                raise RequestError("X held scaled numbers in fit, this X holds pictures.\nGive numbers in the same range.")
            return _decoded(X, image_size, self.channels)[0]
        pixels = self._bytes(X)
        if self.kind == "features":
            square = np.zeros((len(pixels), self.side**2), np.uint8)
            square[:, : pixels.shape[1]] = pixels
            pixels = square.reshape(-1, self.side, self.side)
        pixels = _pictures(pixels, self.image_shape)
        if pixels.shape[3] != self.channels:
            raise RequestError(f"pictures had {self.channels} channels in fit, in this X they have {pixels.shape[3]}.")
        if self.size is not None and pixels.shape[1:3] != self.size:
            (height, width), (now_height, now_width) = self.size, pixels.shape[1:3]
            change = f"{height}x{width} pixels (height x width) in fit, in this X they have {now_height}x{now_width}"
            warnings.warn(f"pictures had {change}; they are resized, and predictions may be worse.", stacklevel=3)
        # torch needs writable memory: scikit-learn may pass read-only arrays.
        return resize(torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(0, 3, 1, 2), image_size)

    def _bytes(self, X: Array) -> NDArray[np.uint8]:
        """Pixels 0..255; numbers of any other type than uint8 are scaled by the range in `fit` and clipped to it."""
        if self.low is None or self.high is None:
            if X.dtype != np.uint8:
                raise RequestError(f"X was uint8 in fit, this X is {X.dtype}.\nGive pixels 0..255 as uint8.")
            return X
        span = np.where(self.high > self.low, self.high - self.low, 1.0)
        scaled = (np.asarray(X, np.float64) - self.low) / span
        levels: NDArray[np.uint8] = np.rint(scaled.clip(0, 1) * 255).astype(np.uint8)
        return levels


def read_files(X: Any) -> Any:
    """A list if X is a list, a one-dimensional array or a pandas Series of paths or Pillow's pictures; else X itself."""
    one_dimensional = isinstance(X, list | tuple) or getattr(X, "ndim", 0) == 1
    return list(X) if one_dimensional and are_files(list(X)) else X


def are_files(X: Any) -> TypeGuard[Files]:
    """Whether X is a list of paths or of Pillow's pictures."""
    return isinstance(X, list) and len(X) > 0 and isinstance(X[0], str | Path | Image.Image)


def learn_format(X: Any, image_shape: Sequence[int] | None) -> InputFormat:
    """The format of X in `fit`: files, or an array of numbers (N, H, W[, C]) or (N, features)."""
    if are_files(X):
        side, channels = choose_size(X)
        return InputFormat("files", side, 3 if channels == 3 else _decoded(X, SMALLEST_SIDE, 1)[1])
    low = high = None
    are_features = X.ndim == 2 and image_shape is None
    if X.dtype != np.uint8:
        values, axis = np.asarray(X, np.float64), 0 if are_features else None
        low, high = np.asarray(values.min(axis=axis)), np.asarray(values.max(axis=axis))
    if are_features:
        return InputFormat("features", max(SMALLEST_SIDE, math.ceil(math.sqrt(X.shape[1]))), 1, low=low, high=high)
    shape = tuple(int(length) for length in image_shape) if X.ndim == 2 and image_shape is not None else None
    height, width, channels = _pictures(X[:1], shape).shape[1:]
    return InputFormat("pictures", min(height, width), channels, (height, width), shape, low, high)


def read_labels(y: Array) -> tuple[Array, Tensor]:
    """The sorted classes in y, and the index of each entry's class (int64), -1 for unlabeled entries.

    -1 and NaN mean unlabeled, and so do None, "" and pandas' NA in arrays of objects or text.
    """
    known = np.array([not _is_unlabeled(value) for value in y.tolist()], bool)
    if y.dtype.kind in "US" and (y == "-1").any():
        raise RequestError('y is an array of text with "-1" in it.\nWrite "" for unlabeled, or use an array of objects.')
    try:
        classes, numbers = np.unique(y[known], return_inverse=True)
    except TypeError as error:
        raise RequestError("y mixes classes of different types.\nUse either text or numbers.") from error
    if y.dtype.kind == "O" and not all(isinstance(name, str) for name in classes):
        classes = np.array(classes.tolist())  # numbers among None or NA: scikit-learn refuses numbers of type object
    if y.dtype.kind == "f" and np.isinf(classes).any():
        raise RequestError("Input y contains infinity.\nClasses are finite numbers; NaN means unlabeled.")
    labels = np.full(len(y), UNLABELED, np.int64)
    labels[known] = numbers
    return classes, torch.from_numpy(labels)


def labeled_entries(y: Any) -> tuple[NDArray[np.intp], Array]:
    """The rows of y that are labeled, and their classes."""
    classes, labels = read_labels(column_or_1d(y))
    rows = np.flatnonzero(labels != UNLABELED)
    if not len(rows):
        raise RequestError("every entry of y is unlabeled: scores and folds need labeled ones.\nGive some labels.")
    return rows, classes[labels[rows]]


def _is_unlabeled(value: Any) -> bool:
    if value is None or type(value).__name__ == "NAType":  # pandas' NA, which is neither equal nor unequal to anything
        return True
    return bool(value != value or value in ("", UNLABELED))


def _pictures(pixels: Array, image_shape: tuple[int, ...] | None) -> Array:
    """Pictures (N, H, W, C), from (N, H, W[, C]) or, with an image shape, from (N, H * W * C)."""
    if image_shape is not None:
        if len(image_shape) not in (2, 3) or math.prod(image_shape) != pixels[0].size:
            asked = f"image_shape {image_shape} does not fit {pixels[0].size} features"
            raise RequestError(f"{asked}.\nGive (H, W) or (H, W, C) with that product.")
        pixels = pixels.reshape(len(pixels), *image_shape)
    if pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] not in (1, 3)):
        found = f"X of shape {pixels.shape} holds no pictures"
        raise RequestError(f"{found}.\nGive (N, H, W), (N, H, W, 1) or (N, H, W, 3), or a list of paths or of PIL images.")
    return pixels if pixels.ndim == 4 else pixels[..., None]


def _decoded(pictures: Any, size: int, channels: int) -> tuple[Tensor, int]:
    """Pictures uint8 (N, C, size, size), and the number of channels they need: 1 if all of them are grayscale."""
    if isinstance(pictures[0], Image.Image):
        decoded = [decode_image(ImageOps.exif_transpose(picture), size, channels) for picture in pictures]
        pixels = np.frombuffer(bytearray(b"".join(content for content, _ in decoded)), np.uint8)
        pixels, facts = pixels.reshape(-1, size, size, channels), [one for _, one in decoded]
    else:
        pixels, found = decode_pictures(pictures, size, channels)
        broken = [f"{path}: {what}" for path, what in zip(pictures, found, strict=True) if isinstance(what, str)]
        if broken:
            problem = f"{len(broken)} of {len(pictures)} pictures cannot be read: {join_names(broken, 3)}"
            raise DataError(f"{problem}.\nLeave them out.")
        facts = [what for what in found if not isinstance(what, str)]
    gray = all(one.gray for one in facts)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2), 1 if gray else 3
