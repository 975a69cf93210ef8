"""The review page: the unlabeled pictures of a run with what its model believes, in one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from numpy.typing import NDArray
from PIL import Image

from crmatch.atomic_files import write_file
from crmatch.data.folder.scan import LABELS_FILE, label_lines
from crmatch.data.folder.workers import decode_pictures
from crmatch.errors import RequestError
from crmatch.methods import METHODS
from crmatch.predict.label_suggestions import ReviewedRun

THUMBNAIL = 80
"""Side in pixels of the thumbnails of a folder's pictures; images of a data set are shown as they are."""
SHOWN_CLASSES = 3


def write_review(run: ReviewedRun, out: Path, most: int | None = None) -> int:
    """Write the page of the unlabeled images, or of the `most` least certain ones; returns how many there are."""
    order = run.beliefs.uncertainty.argsort(descending=True, stable=True)[:most].tolist()
    if not order:
        raise RequestError("this run has no unlabeled images: there is nothing to review.")
    thumbnails = _thumbnails(run, [int(run.beliefs.rows[place]) for place in order])
    spec = run.spec
    data = {
        "key": _key(run),
        "classes": list(run.model.class_names),
        "kept": _kept_labels(run),
        "pixelated": spec.data.folder is None,
        "images": [_image(run, place, picture) for place, picture in zip(order, thumbnails, strict=True)],
    }
    title = f"{METHODS[spec.method.name].title} on {spec.setting}"
    labels = f"{len(run.split.labeled):,} labels, {len(run.beliefs.rows):,} unlabeled images"
    templates = Environment(loader=PackageLoader("crmatch.report"), autoescape=True)
    page = templates.get_template("review.html").render(title=title, labels=labels, data=data)
    write_file(out, page.encode())
    return len(order)


def _image(run: ReviewedRun, place: int, picture: str) -> dict[str, Any]:
    """What the page knows about one image, in short keys: there are thousands."""
    beliefs = run.beliefs
    values, classes = beliefs.probabilities[place].topk(min(SHOWN_CLASSES, len(run.model.class_names)))
    return {
        "n": run.names[int(beliefs.rows[place])],
        "c": classes.tolist(),
        "p": [round(value, 3) for value in values.tolist()],
        "u": round(float(beliefs.uncertainty[place]), 4),
        "d": round(float(beliefs.disagreement[place]), 3),
        "s": round(float(beliefs.surprise[place]), 4),
        "t": picture,
    }


def _key(run: ReviewedRun) -> str:
    """Under which name the browser keeps choices: the same for the same pictures and classes."""
    content = "\0".join([run.spec.setting, *run.model.class_names, run.train.fingerprint])
    return "crmatch-review-" + hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _kept_labels(run: ReviewedRun) -> list[tuple[str, str]]:
    """Labels of the file the run was trained with, which the page's own labels.csv goes on holding."""
    data = run.spec.data
    own = Path(data.folder) / LABELS_FILE if data.folder else None
    file = Path(data.labels_file) if data.labels_file else own
    return [line for line in label_lines(file) if line[1]] if file and file.is_file() else []


def _thumbnails(run: ReviewedRun, rows: list[int]) -> list[str]:
    """WebP pictures as data URLs."""
    folder = run.spec.data.folder
    if folder is None:
        pixels = run.train.images[rows].permute(0, 2, 3, 1).numpy()
        return [_encoded(image, lossless=True) for image in pixels]
    decoded, _ = decode_pictures([Path(folder) / run.names[row] for row in rows], THUMBNAIL, 3)
    return [_encoded(image, lossless=False) for image in decoded]


def _encoded(pixels: NDArray[np.uint8], lossless: bool) -> str:
    picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
    file = io.BytesIO()
    picture.convert("RGB").save(file, "WEBP", lossless=lossless, quality=60, method=1)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
