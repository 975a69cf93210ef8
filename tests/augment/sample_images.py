"""Images that are hard in different ways, for comparisons with Pillow."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def sample_images(count: int, channels: int, height: int, width: int, generator: np.random.Generator) -> Tensor:
    """Uint8 (count, channels, height, width): noise, narrow ranges, few values, constant and two-valued images, ramps."""
    images = generator.integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    kind = np.arange(count) % 8
    for i in range(count):
        low, high = sorted(generator.integers(0, 256, 2))
        if kind[i] == 3:
            images[i] = generator.integers(low, high + 1, images[i].shape)
        elif kind[i] == 4:
            images[i] = low
        elif kind[i] == 5:
            images[i] = np.where(generator.random(images[i].shape) < generator.random(), low, high)
        elif kind[i] == 6:
            images[i] = np.linspace(low, high, height * width).reshape(height, width)
        elif kind[i] == 7:
            images[i] = generator.choice([0, 1, 127, 128, 254, 255], images[i].shape)
    return torch.from_numpy(images)


def to_pillow(images: Tensor) -> list[Image.Image]:
    """One Pillow image per image, mode L for gray."""
    arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
    return [Image.fromarray(array[..., 0] if array.shape[2] == 1 else array) for array in arrays]


def from_pillow(pictures: list[Image.Image]) -> Tensor:
    """The inverse of `to_pillow`."""
    arrays = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(arrays[:, None] if arrays.ndim == 3 else arrays.transpose(0, 3, 1, 2))
