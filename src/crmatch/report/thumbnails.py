"""Images inside the page: small pictures as data addresses, so that the page needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

LARGEST = 96
"""Side above which pictures are shrunk; above 32 pixels they become JPEG, a tenth of PNG's size."""
RIGHT, WRONG = (37, 106, 191), (208, 73, 32)
"""Colors of large confusion matrices; opacity carries the value, so that they suit light and dark pages."""


def thumbnail(image: Tensor) -> str:
    """A data address of an image uint8 (C, H, W)."""
    pixels = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
    if max(picture.size) > LARGEST:
        picture.thumbnail((LARGEST, LARGEST), Image.Resampling.BOX)
    small = max(picture.size) <= 32
    return _address(picture, "PNG" if small else "JPEG")


def confusion_picture(shares: Sequence[Sequence[float]]) -> str:
    """A data address of a picture with one pixel per cell of a confusion matrix given as shares 0..1 of each row."""
    values = np.asarray(shares, dtype=np.float64)
    pixels = np.zeros((*values.shape, 4), dtype=np.uint8)
    pixels[..., :3] = WRONG
    pixels[np.arange(len(values)), np.arange(len(values)), :3] = RIGHT
    pixels[..., 3] = np.rint(255 * np.sqrt(values))
    return _address(Image.fromarray(pixels), "PNG")


def _address(picture: Image.Image, kind: str) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **({"optimize": True} if kind == "PNG" else {"quality": 85}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
