"""The one way in which pictures become square. Imports no torch."""

from __future__ import annotations

from PIL import Image


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
