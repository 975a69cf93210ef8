"""What scikit-learn's users hand over, X and y, as the images and labels that a run is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.data.folder.decode import choose_size
from crmatch.data.folder.scan import join_names
from crmatch.data.folder.workers import decode_pictures
from crmatch.data.images import UNLABELED, resize
from crmatch.data.square import SMALLEST_SIDE
from crmatch.errors import DataError, RequestError

Array = NDArray[Any]


@dataclass(frozen=True)
class InputFormat:
    """How X becomes images: learned in `fit`, the same in `predict`.

    Attributes:
        kind: `paths` of picture files, `pictures` as arrays, or `features`, numbers without geometry.
        side: of the images as they come, in pixels; where they are not square, the shorter one.
        channels: 1 or 3.
        image_shape: (H, W[, C]) of one row of a two-dimensional X that holds pictures.
        low: smallest value seen, of each feature or of all pixels; None where X is uint8 or paths.
        high: largest value seen.
    """

    kind: Literal["paths", "pictures", "features"]
    side: int
    channels: int
    image_shape: tuple[int, ...] | None = None
    low: Array | None = None
    high: Array | None = None

    def images(self, X: Any, image_size: int) -> Tensor:
        """Images uint8 (N, C, image_size, image_size) of X."""
        if self.kind == "paths":
            return _decoded(X, image_size, self.channels)[0]
        pixels = self._bytes(X)
        if self.kind == "features":
            square = np.zeros((len(pixels), self.side**2), np.uint8)
            square[:, : pixels.shape[1]] = pixels
            pixels = square.reshape(-1, self.side, self.side)
        return resize(_channels_first(_shaped(pixels, self.image_shape), self.channels), image_size)

    def _bytes(self, X: Array) -> NDArray[np.uint8]:
        """Pixels 0..255; other numbers than uint8 are scaled by the range seen in `fit` and clipped to it."""
        if self.low is None or self.high is None:
            if X.dtype != np.uint8:
                raise RequestError(f"fit saw uint8 pixels, this X is {X.dtype}.\nGive pixels 0..255 as uint8.")
            return X
        span = np.where(self.high > self.low, self.high - self.low, 1.0)
        scaled = (np.asarray(X, np.float64) - self.low) / span
        levels: NDArray[np.uint8] = np.rint(scaled.clip(0, 1) * 255).astype(np.uint8)
        return levels


def are_paths(X: Any) -> bool:
    """Whether X is a list or array of paths of pictures."""
    if isinstance(X, np.ndarray):
        return X.ndim == 1 and X.size > 0 and isinstance(X[0], str | Path)
    return isinstance(X, list | tuple) and len(X) > 0 and isinstance(X[0], str | Path)


def learn_format(X: Any, image_shape: Sequence[int] | None) -> InputFormat:
    """The format of the X that `fit` got: paths, or an array of numbers (N, H, W[, C]) or (N, features)."""
    if are_paths(X):
        side, channels = choose_size(list(X))
        channels = 3 if channels == 3 else _decoded(X, SMALLEST_SIDE, 1)[1]
        return InputFormat("paths", side, channels)
    if X.ndim == 2 and image_shape is None:
        side = max(SMALLEST_SIDE, math.ceil(math.sqrt(X.shape[1])))
        return InputFormat("features", side, 1, None, *_range(X, axis=0))
    shape = tuple(int(length) for length in image_shape) if X.ndim == 2 and image_shape is not None else None
    height, width, *channels_last = _shaped(X[:1], shape).shape[1:]
    channels = channels_last[0] if channels_last else 1
    return InputFormat("pictures", min(height, width), channels, shape, *_range(X, axis=None))


def read_labels(y: Array) -> tuple[Array, Tensor]:
    """The classes in y, sorted, and the number of each entry's class, -1 where it is unlabeled (int64).

    Unlabeled are -1 and NaN in numbers, and also None and "" in arrays of objects or text.
    """
    known = ~np.fromiter((_is_unlabeled(value) for value in y.tolist()), bool, len(y))
    if y.dtype.kind in "US" and (y == "-1").any():
        raise RequestError('y is an array of text with "-1" in it.\nWrite "" for unlabeled, or use an array of objects.')
    try:
        classes, numbers = np.unique(y[known], return_inverse=True)
    except TypeError as error:
        raise RequestError("y mixes classes of different types.\nUse either text or numbers.") from error
    labels = np.full(len(y), UNLABELED, np.int64)
    labels[known] = numbers
    if y.dtype.kind == "f" and len(classes) and np.isinf(classes).any():
        raise RequestError("Input y contains infinity.\nClasses are finite numbers; NaN means unlabeled.")
    return classes, torch.from_numpy(labels)


def _is_unlabeled(value: Any) -> bool:
    if value is None or isinstance(value, str):
        return not value
    if isinstance(value, bool | np.bool_):
        return False
    return isinstance(value, int | float | np.number) and bool(value == UNLABELED or value != value)


def _range(X: Array, axis: int | None) -> tuple[Array | None, Array | None]:
    if X.dtype == np.uint8:
        return None, None
    values = np.asarray(X, np.float64)
    return np.asarray(values.min(axis=axis)), np.asarray(values.max(axis=axis))


def _shaped(pixels: Array, image_shape: tuple[int, ...] | None) -> Array:
    """(N, H, W[, C]) from the same, or from (N, H * W * C)."""
    if image_shape is not None:
        if len(image_shape) not in (2, 3) or math.prod(image_shape) != pixels[0].size:
            asked = f"image_shape {image_shape} does not fit {pixels[0].size} features"
            raise RequestError(f"{asked}.\nGive (H, W) or (H, W, C) with that product.")
        pixels = pixels.reshape(len(pixels), *image_shape)
    if pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[3] not in (1, 3)):
        found = f"X of shape {pixels.shape} holds no pictures"
        raise RequestError(f"{found}.\nGive (N, H, W), (N, H, W, 1) or (N, H, W, 3), or paths of picture files.")
    return pixels


def _channels_first(pixels: NDArray[np.uint8], channels: int) -> Tensor:
    images = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
    if images.shape[1] != channels:
        raise RequestError(f"fit saw pictures of {channels} channels, this X has {images.shape[1]}.")
    return images


def _decoded(paths: Sequence[str | Path], size: int, channels: int) -> tuple[Tensor, int]:
    """Pictures uint8 (N, C, size, size), and the channels they need: 1 where all of them are gray."""
    pixels, found = decode_pictures(list(paths), size, channels)
    broken = [f"{path}: {what}" for path, what in zip(paths, found, strict=True) if isinstance(what, str)]
    if broken:
        raise DataError(f"{len(broken)} of {len(paths)} pictures cannot be read: {join_names(broken, 3)}.\nLeave them out.")
    gray = all(not isinstance(what, str) and what.gray for what in found)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2), 1 if gray else 3
