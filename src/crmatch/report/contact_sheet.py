"""Contact sheets: a few pictures of every class under its name, to see that labels and images belong together."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw

from crmatch.data.images import ImageSet
from crmatch.report.pictures import GAP, PAPER, TILE, grid, save, write

LABEL = 130
CLASSES_PER_COLUMN = 25


def draw_contact_sheet(images: ImageSet, title: str, out: Path) -> None:
    """One row per class with its first pictures; long lists of classes go on in further columns."""
    per_class = 10 if images.classes <= CLASSES_PER_COLUMN else 4
    columns = -(-images.classes // CLASSES_PER_COLUMN)
    rows = min(images.classes, CLASSES_PER_COLUMN)
    block = LABEL + per_class * (TILE + GAP) + 16
    page = Image.new("RGB", (columns * block, 40 + rows * (TILE + GAP)), PAPER)
    pen = ImageDraw.Draw(page)
    write(pen, (8, 8), title, 18)
    for label, name in enumerate(images.class_names):
        left, top = label // CLASSES_PER_COLUMN * block, 40 + label % CLASSES_PER_COLUMN * (TILE + GAP)
        write(pen, (left + 8, top + TILE // 2 - 8), name if len(name) <= 18 else f"{name[:17]}…", 13)
        chosen = (images.labels == label).nonzero().squeeze(1)[:per_class]
        if len(chosen):
            page.paste(grid(images.images[chosen], per_class), (left + LABEL, top))
    save(page, out)
