"""Pictures of the augmentations, as in the paper's appendix and in the right half of its Figure 1."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from crmatch.augment.operations import OPERATIONS, apply_operation
from crmatch.augment.randaugment import RandAugment
from crmatch.augment.variants import VARIANTS, Magnitude
from crmatch.augment.weak import WeakAugmentation, weak_views
from crmatch.data.folder.decode import decode_picture
from crmatch.errors import DataError
from crmatch.randomness import generator
from crmatch.report.pictures import GAP, PAPER, TILE, grid, save, tile, write

EXAMPLES = 60
COLUMNS = 10
MARGIN = 8


def read_picture(path: Path, size: int = 96) -> Tensor:
    """One picture file as uint8 (1, 3, size, size), upright and center-cropped."""
    try:
        pixels = decode_picture(path, size, channels=3)
    except DataError as error:
        raise DataError(f"{path} cannot be read as a picture: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)[None]


def transformation_table(variant: str) -> list[dict[str, str]]:
    """The paper's table of transformations: name, description, parameter, range."""
    rows = []
    for name in VARIANTS[variant].operations:
        row = {"transformation": name, "description": OPERATIONS[name].description, "parameter": "", "range": ""}
        if magnitude := VARIANTS[variant].magnitudes.get(name):
            low, high = _ends(magnitude, variant)
            row |= {"parameter": OPERATIONS[name].unit, "range": f"[{low:g}, {high:g}]"}
        rows.append(row)
    return rows


def draw_gallery(images: Tensor, name: str, out: Path, variant: str, *, mirror: bool) -> None:
    """Write a PNG with four figures of square uint8 images (N, C, H, W); three of them show the first image only."""
    one, several = images[:1].expand(EXAMPLES, -1, -1, -1), images[:COLUMNS]
    pairs = torch.cat([_views(several, mirror, variant, strong) for strong in (False, True)])
    figures = {
        "Every operation over its range": _operations_figure(images[:1], variant),
        f"{EXAMPLES} strong views of one image": grid(_views(one, mirror, variant, strong=True), COLUMNS),
        f"{EXAMPLES} weak views of one image": grid(_views(one, mirror, variant, strong=False), COLUMNS),
        "Weak views above strong views": grid(pairs, len(several)),
    }
    width = max(figure.width for figure in figures.values()) + 2 * MARGIN
    height = sum(figure.height + 44 for figure in figures.values()) + MARGIN
    page = Image.new("RGB", (width, height), PAPER)
    pen, top = ImageDraw.Draw(page), MARGIN
    for title, figure in figures.items():
        write(pen, (MARGIN, top), f"{title} ({name}, variant {variant})", 20)
        page.paste(figure, (MARGIN, top + 32))
        top += figure.height + 44
    save(page, out)


def _operations_figure(original: Tensor, variant: str) -> Image.Image:
    """One row per operation: the original, then values increasing from left to right."""
    left, row_height = 110, TILE + 18
    figure = Image.new("RGB", (left + (COLUMNS + 1) * (TILE + GAP), len(VARIANTS[variant].operations) * row_height), PAPER)
    pen = ImageDraw.Draw(figure)
    for row, name in enumerate(VARIANTS[variant].operations):
        magnitude = VARIANTS[variant].magnitudes.get(name)
        low, high = _ends(magnitude, variant) if magnitude else (0.0, 0.0)
        values = torch.linspace(low, high, COLUMNS if magnitude else 1, dtype=torch.float64)
        if name == "posterize":
            values = torch.arange(round(low), round(high) + 1, dtype=torch.float64)
        shown = apply_operation(name, original.expand(len(values), -1, -1, -1), values)
        write(pen, (0, row * row_height + TILE // 2 - 8), name, 14)
        captions = ["original", *(f"{value:.3g}" if magnitude else "" for value in values.tolist())]
        for column, (image, text) in enumerate(zip(torch.cat([original, shown]), captions, strict=True)):
            place = (left + column * (TILE + GAP), row * row_height)
            figure.paste(tile(image), place)
            write(pen, (place[0] + 2, place[1] + TILE), text, 11)
    return figure


def _views(images: Tensor, mirror: bool, variant: str, strong: bool) -> Tensor:
    randomness = generator(0, "gallery/strong" if strong else "gallery/weak")
    size = images.shape[3]
    weak = weak_views(images, WeakAugmentation(size // 8, mirror), randomness)
    if not strong:
        return weak
    policy = RandAugment(variant)
    return policy.apply(weak, policy.draw(len(images), size, size, randomness))


def _ends(magnitude: Magnitude, variant: str) -> tuple[float, float]:
    """Smallest and largest value of an operation; one-sided ranges with a random sign are mirrored."""
    whole = magnitude.rounding == "truncate" and VARIANTS[variant].strength == "uniform"
    strengths = (0.1, 0.9) if VARIANTS[variant].strength == "level" else (0, 1)
    low, high = sorted(magnitude.start + magnitude.span * strength - whole * (strength == 1) for strength in strengths)
    return (-high if VARIANTS[variant].signed and magnitude.start == 0 else low), high
