"""How pictures become square: the shorter side is resized, then the center is cropped. Imports no torch."""

from __future__ import annotations

from PIL import Image

from crmatch.errors import RequestError

SMALLEST_SIDE = 8
"""The smallest image side, in pixels, that networks and augmentations accept."""


def check_size(size: int) -> None:
    """Raise a `RequestError` if `size` is too small for an image side."""
    if size < SMALLEST_SIDE:
        raise RequestError(f"image size {size} is too small.\nUse at least {SMALLEST_SIDE} pixels.")


def covering_size(width: int, height: int, size: int) -> tuple[int, int]:
    """(width, height) of a picture after its shorter side is resized to `size`."""
    scale = size / min(width, height)
    return max(size, round(width * scale)), max(size, round(height * scale))


def square(picture: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side to `size` (Lanczos), then crop the center; returns the same object if nothing changes."""
    if picture.size == (size, size):
        return picture
    width, height = covering_size(*picture.size, size)
    left, top = (width - size) // 2, (height - size) // 2
    return picture.resize((width, height), Image.Resampling.LANCZOS).crop((left, top, left + size, top + size))
