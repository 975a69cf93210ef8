"""Drawing with Pillow: tiles, grids, labels; shared by all picture pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from crmatch.errors import DataError

TILE = 64
GAP = 4
INK, PAPER = (32, 32, 32), (255, 255, 255)


def tile(image: Tensor) -> Image.Image:
    """An image uint8 (C, H, W) as a square picture of `TILE` pixels, its pixels kept visible."""
    pixels = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
    smooth = max(picture.size) > TILE
    return picture.convert("RGB").resize((TILE, TILE), Image.Resampling.BOX if smooth else Image.Resampling.NEAREST)


def grid(images: Tensor, columns: int) -> Image.Image:
    """Images uint8 (N, C, H, W) in rows of `columns`."""
    rows = -(-len(images) // columns)
    figure = Image.new("RGB", (columns * (TILE + GAP), rows * (TILE + GAP)), PAPER)
    for index, image in enumerate(images):
        figure.paste(tile(image), (index % columns * (TILE + GAP), index // columns * (TILE + GAP)))
    return figure


def write(pen: ImageDraw.ImageDraw, place: tuple[int, int], text: str, size: int) -> None:
    """Text in Pillow's own font, so that no font file is needed."""
    pen.text(place, text, INK, ImageFont.load_default(size))


def save(page: Image.Image, out: Path) -> None:
    """Write a page as PNG."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        page.save(out, "PNG")
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}.\nChoose another --out.") from error
