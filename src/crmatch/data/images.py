"""Image sets in memory: one uint8 tensor with labels and class names, checked when it is made."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from crmatch.data.square import SMALLEST_SIDE, check_size, square
from crmatch.errors import DataError

UNLABELED, LEFT_OUT = -1, -2


@dataclass(frozen=True)
class ImageSet:
    """Images with their labels."""

    images: Tensor  # uint8 (N, C, H, W) with C of 1 or 3 and any strides: arrays stored as (N, H, W, C) are not copied
    labels: Tensor  # int64 (N,), UNLABELED if unknown, LEFT_OUT if the image is not used at all
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        check_images(self.images)
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels must be int64 of shape ({len(self.images)},), found {self.labels.dtype} {tuple(self.labels.shape)}."
            )
        low, high = int(self.labels.min()), int(self.labels.max())
        if not LEFT_OUT <= low <= high < self.classes:
            raise DataError(
                f"labels range from {low} to {high}, but there are {self.classes} classes.\n"
                f"Use labels from 0 to {self.classes - 1}, and {UNLABELED} for unlabeled images."
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change if the labels, the shape or any of 256 evenly spaced images change."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(str(tuple(self.images.shape)).encode())
        digest.update(self.labels.numpy().tobytes())
        stride = max(1, len(self) // 256)
        digest.update(self.images[::stride].contiguous().numpy().tobytes())
        return digest.hexdigest()


class DataSet(NamedTuple):
    """A training set, labeled or not, with an optional test set."""

    train: ImageSet
    test: ImageSet | None
    folds: Tensor | None = None  # int64 (F, L): the labeled rows of `train` in each published fold (STL-10 only)


def check_images(images: Tensor) -> None:
    """Raise a `DataError` unless `images` is a non-empty uint8 tensor (N, C, H, W) with 1 or 3 channels."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise DataError(f"images must be uint8 (N, C, H, W), found {images.dtype} of shape {tuple(images.shape)}.")
    count, channels, height, width = images.shape
    if count == 0 or channels not in (1, 3) or min(height, width) < SMALLEST_SIDE:
        raise DataError(
            f"images of shape {tuple(images.shape)} cannot be used.\n"
            f"At least one image, 1 or 3 channels and sides of at least {SMALLEST_SIDE} pixels are needed."
        )


def resize(images: Tensor, size: int) -> Tensor:
    """Make images square with `square`: uint8 (N, C, H, W) -> (N, C, size, size). Returns them as they are if they fit."""
    check_size(size)
    if images.shape[2:] == (size, size):
        return images
    result = np.empty((len(images), size, size, images.shape[1]), np.uint8)
    for row, image in enumerate(images.permute(0, 2, 3, 1).numpy()):
        picture = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else np.ascontiguousarray(image))
        result[row] = np.asarray(square(picture, size)).reshape(size, size, -1)
    return torch.from_numpy(result).permute(0, 3, 1, 2)
