"""Pictures drawn with Pillow: tiles, grids and contact sheets, and images embedded in HTML pages."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from crmatch.analysis.finished_run import open_run
from crmatch.atomic_files import write_file
from crmatch.data.folder.workers import decode_pictures
from crmatch.data.images import ImageSet
from crmatch.evaluation import reliability
from crmatch.runs.workspace import Workspace

TILE = 64
GAP = 4
INK, PAPER = (32, 32, 32), (255, 255, 255)
LABEL = 130
"""Width of the class names on a contact sheet."""
CLASSES_PER_COLUMN = 25
LARGEST = 96
"""Larger images are shrunk to this side in pages; above 32 pixels they are stored as JPEG, a tenth of PNG's size."""
RIGHT, WRONG = (37, 106, 191), (208, 73, 32)
"""Colors of large confusion matrices; the value is the opacity, so that they suit light and dark pages."""
SHOWN = 24


def picture(image: Tensor) -> Image.Image:
    """An image uint8 (C, H, W) with one or three channels as a Pillow image."""
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)


def tile(image: Tensor) -> Image.Image:
    """An image uint8 (C, H, W) as a square picture of `TILE` pixels; a small image keeps its pixels visible."""
    full = picture(image)
    resampling = Image.Resampling.BOX if max(full.size) > TILE else Image.Resampling.NEAREST
    return full.convert("RGB").resize((TILE, TILE), resampling)


def grid(images: Tensor, columns: int) -> Image.Image:
    """Images uint8 (N, C, H, W) in rows of `columns`."""
    rows = -(-len(images) // columns)
    figure = Image.new("RGB", (columns * (TILE + GAP), rows * (TILE + GAP)), PAPER)
    for index, image in enumerate(images):
        figure.paste(tile(image), (index % columns * (TILE + GAP), index // columns * (TILE + GAP)))
    return figure


def write(pen: ImageDraw.ImageDraw, place: tuple[int, int], text: str, size: int) -> None:
    """Write text in Pillow's built-in font, so that no font file is needed."""
    pen.text(place, text, INK, ImageFont.load_default(size))


def save(page: Image.Image, out: Path) -> None:
    """Write a page as PNG."""
    file = io.BytesIO()
    page.save(file, "PNG")
    write_file(out, file.getvalue())


def draw_contact_sheet(images: ImageSet, title: str, out: Path) -> None:
    """One row per class with its first pictures; many classes continue in further columns."""
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


def data_url(image: Image.Image, kind: str, **options: Any) -> str:
    """An image as a data URL, so that a page needs no other file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def confusion_picture(shares: Sequence[Sequence[float]]) -> str:
    """A data URL of a picture with one pixel per cell of a confusion matrix, given as shares 0..1 of each row."""
    values = np.asarray(shares, dtype=np.float64)
    pixels = np.zeros((*values.shape, 4), dtype=np.uint8)
    pixels[..., :3] = WRONG
    pixels[np.arange(len(values)), np.arange(len(values)), :3] = RIGHT
    pixels[..., 3] = np.rint(255 * np.sqrt(values))
    return data_url(Image.fromarray(pixels), "PNG", optimize=True)


def image_views(path: Path, workspace: Workspace) -> dict[str, Any]:
    """Single images for the page of the run in `path`, and its calibration.

    Returns:
        mistakes: the most confident mistakes on the test set.
        uncertain: the images with the lowest confidence, of the test set or, without one, of the unlabeled images.
        uncertain_source: `Test` or `Unlabeled`.
        bins: reliability on the test set.

    Pictures of a folder come with their file and are read again, because training images may be smaller.
    """
    run = open_run(path, workspace)
    train, test, names = run.data.train, run.data.test, run.model.class_names
    images, labels = (
        (test.images, test.labels) if test else (part[run.split.unlabeled] for part in (train.images, train.labels))
    )
    probabilities = run.model.predict_probabilities(images)
    files: Sequence[str] = ()
    if run.pictures is not None:
        unlabeled = run.split.unlabeled.tolist()
        files = run.pictures.test_paths if test else [run.pictures.train_paths[row] for row in unlabeled]
    folder = Path(run.record.spec.data.folder or "")

    def thumbnails(rows: Tensor) -> list[dict[str, str]]:
        confidence, classes = probabilities[rows].topk(2, dim=1)
        shown = images[rows]
        if files:
            pixels, _ = decode_pictures([folder / files[row] for row in rows.tolist()], LARGEST, images.shape[1])
            shown = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        return [
            {
                "address": _thumbnail(image),
                "file": files[row] if files else "",
                "link": (folder / files[row]).as_uri() if files else "",
                "predicted": names[first],
                "second": names[second],
                "truth": names[truth] if truth >= 0 else "",
                "confidence": f"{min(100 * value, 99.9):.1f} %",
            }
            for row, image, (first, second), truth, (value, _) in zip(
                rows.tolist(), shown, classes.tolist(), labels[rows].tolist(), confidence.tolist(), strict=True
            )
        ]

    return {
        "mistakes": thumbnails(confident_mistakes(probabilities, labels, SHOWN)) if test else [],
        "uncertain": thumbnails(least_certain(probabilities, SHOWN)),
        "uncertain_source": "Test" if test else "Unlabeled",
        "bins": reliability(probabilities, labels) if test else [],
    }


def confident_mistakes(probabilities: Tensor, labels: Tensor, count: int) -> Tensor:
    """Rows of up to `count` misclassified images of (N, K) probabilities, the most confident first."""
    confidence, predicted = probabilities.max(dim=1)
    wrong = ((predicted != labels) & (labels >= 0)).nonzero().squeeze(1)
    return wrong[confidence[wrong].argsort(descending=True, stable=True)[:count]]


def least_certain(probabilities: Tensor, count: int) -> Tensor:
    """Rows of up to `count` images of (N, K) probabilities, the lowest confidence first."""
    return probabilities.amax(dim=1).argsort(stable=True)[:count]


def _thumbnail(image: Tensor) -> str:
    small = picture(image)
    small.thumbnail((LARGEST, LARGEST), Image.Resampling.BOX)  # does nothing to smaller images
    return data_url(small, "PNG", optimize=True) if max(small.size) <= 32 else data_url(small, "JPEG", quality=85)
