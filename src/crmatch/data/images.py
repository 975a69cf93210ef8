"""The one way in which pictures become square. Imports no torch.

Image sets: one uint8 tensor, labels and class names, checked once at the door.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from crmatch.errors import DataError, RequestError


def covering_size(width: int, height: int, size: int) -> tuple[int, int]:
    """(width, height) of a picture whose shorter side is brought to `size`."""
    scale = size / min(width, height)
    return max(size, round(width * scale)), max(size, round(height * scale))


def square(picture: Image.Image, size: int) -> Image.Image:
    """Shorter side resampled to `size` (Lanczos), then center-cropped; the picture itself where nothing changes."""
    if picture.size == (size, size):
        return picture
    width, height = covering_size(*picture.size, size)
    left, top = (width - size) // 2, (height - size) // 2
    return picture.resize((width, height), Image.Resampling.LANCZOS).crop((left, top, left + size, top + size))


UNLABELED = -1
SMALLEST_SIDE = 8


@dataclass(frozen=True)
class ImageSet:
    """Images with what is known about them.

    Attributes:
        images: uint8 (N, C, H, W) with C of 1 or 3; any strides, so that arrays stored as (N, H, W, C) need no copy.
        labels: int64 (N,), `UNLABELED` where unknown.
        class_names: one name per class.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        check_images(self.images)
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels must be int64 of shape ({len(self.images)},), found {self.labels.dtype} {tuple(self.labels.shape)}."
            )
        if len(self.labels) and not UNLABELED <= int(self.labels.min()) <= int(self.labels.max()) < self.classes:
            low, high = int(self.labels.min()), int(self.labels.max())
            raise DataError(
                f"labels run from {low} to {high}, but there are {self.classes} classes.\n"
                f"Labels must lie in 0..{self.classes - 1}, or be {UNLABELED} where unknown."
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when labels, shape or any of 256 evenly spaced images change."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(str(tuple(self.images.shape)).encode())
        digest.update(self.labels.numpy().tobytes())
        stride = max(1, len(self) // 256)
        digest.update(self.images[::stride].contiguous().numpy().tobytes())
        return digest.hexdigest()


class DataSet(NamedTuple):
    """A training set and, where there are such, a test set and published labeled sets.

    Attributes:
        train: all training images, labels known or not.
        test: None where there is none.
        folds: int64 (F, L), rows of the training set that are labeled in each published fold (STL-10).
    """

    train: ImageSet
    test: ImageSet | None
    folds: Tensor | None = None


def check_images(images: Tensor) -> None:
    """Raise a `DataError` unless `images` is a non-empty uint8 tensor (N, C, H, W) with 1 or 3 channels."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise DataError(f"images must be uint8 (N, C, H, W), found {images.dtype} of shape {tuple(images.shape)}.")
    count, channels, height, width = images.shape
    if count == 0 or channels not in (1, 3) or min(height, width) < SMALLEST_SIDE:
        raise DataError(
            f"images of shape {tuple(images.shape)} cannot be used.\n"
            f"At least one image, 1 or 3 channels and sides of {SMALLEST_SIDE} pixels or more are needed."
        )


def resize(images: Tensor, size: int) -> Tensor:
    """Square images of `size` pixels: shorter side resampled to `size` (Pillow, Lanczos), then center-cropped.

    Args:
        images: uint8 (N, C, H, W).
        size: side of the result.

    Returns:
        uint8 (N, C, size, size); the images themselves where nothing changes.
    """
    if size < SMALLEST_SIDE:
        raise RequestError(f"image size {size} is too small.\nUse {SMALLEST_SIDE} pixels or more.")
    height, width = images.shape[2:]
    if height == width == size:
        return images
    result = np.empty((len(images), size, size, images.shape[1]), np.uint8)
    for row, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        picture = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else np.ascontiguousarray(image))
        result[row] = np.asarray(square(picture, size)).reshape(size, size, -1)
    return torch.from_numpy(result).permute(0, 3, 1, 2)
