"""Drawing with Pillow: tiles, grids, labels; shared by all picture pages.

Images inside the page: small pictures as data addresses, so that the page needs no other file.

Contact sheets: a few pictures of every class under its name, to see that labels and images belong together.

Pictures of a run for its page: mistakes, doubts and calibration of the evaluated model, from its own data.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from crmatch.analysis.finished_run import Bin, Prediction, confident_mistakes, least_certain, open_run, reliability
from crmatch.data.images import ImageSet
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


SHOWN = 24


class Thumbnail(NamedTuple):
    """A picture with its prediction: classes by name, `truth` empty where unknown, confidence as text."""

    address: str
    predicted: str
    second: str
    truth: str
    confidence: str


class ImageViews(NamedTuple):
    """What the page shows of single images.

    Attributes:
        mistakes: the most confident mistakes on the test set.
        uncertain: the least certain images, of the test set or, without one, of the unlabeled images.
        uncertain_source: which of both.
        bins: reliability on the test set.
    """

    mistakes: list[Thumbnail]
    uncertain: list[Thumbnail]
    uncertain_source: str
    bins: list[Bin]


def image_views(path: Path, data_dir: Path | None) -> ImageViews:
    """Predict the run's test images, or its unlabeled ones where there is no test set, and pick what is worth seeing."""
    run = open_run(path, data_dir)
    names = run.model.class_names

    def shown(images: Tensor, predictions: list[Prediction]) -> list[Thumbnail]:
        return [
            Thumbnail(
                thumbnail(images[one.row]),
                names[one.predicted],
                names[one.second],
                names[one.truth] if one.truth >= 0 else "",
                f"{min(100 * one.confidence, 99.9):.1f} %",
            )
            for one in predictions
        ]

    if run.data.test is None:
        images = run.data.train.images[run.split.unlabeled]
        probabilities = run.model.predict_probabilities(images)
        unknown = run.data.train.labels[run.split.unlabeled]
        return ImageViews([], shown(images, least_certain(probabilities, unknown, SHOWN)), "unlabeled", [])
    images, labels = run.data.test.images, run.data.test.labels
    probabilities = run.model.predict_probabilities(images)
    return ImageViews(
        shown(images, confident_mistakes(probabilities, labels, SHOWN)),
        shown(images, least_certain(probabilities, labels, SHOWN)),
        "test",
        reliability(probabilities, labels),
    )
