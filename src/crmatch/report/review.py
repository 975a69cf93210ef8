"""The review page: a run's unlabeled pictures with its model's predictions, in one file that needs nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader

from crmatch.atomic_files import write_file
from crmatch.data.folder.scan import LABELS_FILE, label_lines
from crmatch.data.folder.workers import decode_pictures
from crmatch.errors import RequestError
from crmatch.methods import title_of
from crmatch.predict.label_suggestions import ReviewedRun
from crmatch.report.pictures import data_url, picture

THUMBNAIL = 80
"""Side in pixels of the thumbnails of a folder's pictures; images of a data set are shown as they are."""
SHOWN_CLASSES = 3


def write_review(reviewed: ReviewedRun, out: Path, most: int | None = None) -> int:
    """Write the page of the unlabeled images, or of the `most` least certain ones; returns their number."""
    run, spec = reviewed.run, reviewed.run.record.spec
    images = _images(reviewed, most)
    if not images:
        raise RequestError("this run has no unlabeled images: there is nothing to review.")
    classes = list(run.model.class_names)
    # Under this key the browser stores the labels; the same pictures and classes give the same key.
    content = "\0".join([spec.setting, *classes, run.data.train.fingerprint])
    data = {
        "key": "crmatch-review-" + hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
        "classes": classes,
        "kept": _kept_labels(reviewed),
        "pixelated": spec.data.folder is None,
        "images": images,
    }
    title = f"{title_of(spec.method)} on {spec.setting}"
    labels = f"{len(run.split.labeled):,} labels, {len(reviewed.scores.rows):,} unlabeled images"
    templates = Environment(loader=PackageLoader("crmatch.report"), autoescape=True)
    write_file(out, templates.get_template("review.html").render(title=title, labels=labels, data=data).encode())
    return len(images)


def _images(reviewed: ReviewedRun, most: int | None) -> list[dict[str, Any]]:
    """The page's data about each image, the least certain first; keys are short because there are thousands of images."""
    scores, uncertainty = reviewed.scores, reviewed.scores.uncertainty
    order = uncertainty.argsort(descending=True, stable=True)[:most]
    rows = scores.rows[order].tolist()
    values, classes = scores.probabilities[order].topk(min(SHOWN_CLASSES, len(reviewed.run.model.class_names)))
    columns = (values, classes, uncertainty[order], scores.disagreement[order], scores.surprise[order])
    return [
        {
            "n": reviewed.names[row],
            "c": best,
            "p": [round(value, 3) for value in probabilities],
            "u": round(uncertain, 4),
            "d": round(disagreement, 3),
            "s": round(surprise, 4),
            "t": address,
        }
        for row, address, probabilities, best, uncertain, disagreement, surprise in zip(
            rows, _thumbnails(reviewed, rows), *(column.tolist() for column in columns), strict=True
        )
    ]


def _kept_labels(reviewed: ReviewedRun) -> list[tuple[str, str]]:
    """Labels of the file the run was trained with; the labels.csv that the page writes contains them too."""
    data = reviewed.run.record.spec.data
    own = Path(data.folder) / LABELS_FILE if data.folder else None
    file = Path(data.labels_file) if data.labels_file else own
    return [line for line in label_lines(file) if line[1]] if file and file.is_file() else []


def _thumbnails(reviewed: ReviewedRun, rows: list[int]) -> list[str]:
    """WebP pictures as data URLs; a folder's pictures are read again, because training images may be smaller."""
    folder = reviewed.run.record.spec.data.folder
    if folder is None:
        images = reviewed.run.data.train.images[rows]
    else:
        pixels, _ = decode_pictures([Path(folder) / reviewed.names[row] for row in rows], THUMBNAIL, 3)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    options = {"lossless": folder is None, "quality": 60, "method": 1}
    return [data_url(picture(image).convert("RGB"), "WEBP", **options) for image in images]
