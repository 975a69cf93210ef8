"""The review page: pictures with a model's predictions, to confirm or correct them as labels.

`write_review` puts everything into one file that needs nothing else; `labeling.py` serves the same page.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

import torch

from crmatch.atomic_files import write_file
from crmatch.data.folder.workers import Progress, decode_pictures
from crmatch.methods import title_of
from crmatch.predict.label_suggestions import ReviewedRun, suggest
from crmatch.report.pictures import data_url, picture
from crmatch.report.rendering import render
from crmatch.report.server import POLICY

THUMBNAIL = 128
"""Side in pixels of the thumbnails of a folder's pictures; images of a data set are shown as they are."""
SHOWN_CLASSES = 3
SUGGESTED = 100
"""Pictures that are ordered by how much their labels would help; the others follow, the least certain first."""
Card = dict[str, Any]
"""What the page knows about a picture; keys are short because there may be thousands of pictures.

i: row; n: name; l: label now (a class, empty if unsure, - if left out, absent if none); b: label by its directory.
c, p: the most probable classes and their probabilities; u, d, s: uncertainty, disagreement and surprise.
x: number of a group of identical pictures with contradicting labels; t, o: addresses of thumbnail and original.
"""


def render_with_scripts(template: str, nonce: str, **values: Any) -> bytes:
    """A page whose scripts and styles carry the nonce."""
    return render(template, nonce=nonce, policy=POLICY.format(nonce=nonce), **values)


def write_review(reviewed: ReviewedRun, out: Path, most: int | None = None, progress: Progress | None = None) -> int:
    """Write the page of all images, or of the `most` unlabeled ones whose labels would help most; returns their number."""
    run, spec = reviewed.run, reviewed.run.record.spec
    cards = unlabeled_cards(reviewed, most)
    shown = cards if most else [*cards, *labeled_cards(reviewed)]
    for card, address in zip(shown, _thumbnails(reviewed, [card["i"] for card in shown], progress), strict=True):
        card["t"] = address
        if spec.data.folder is not None:
            card["o"] = (Path(spec.data.folder) / card["n"]).as_uri()
    classes = list(run.model.class_names)
    # Under this key the browser stores the labels; the same pictures and classes give the same key.
    content = "\0".join([spec.setting, *classes, run.data.train.fingerprint])
    data = {
        "key": "crmatch-labels-" + hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
        "classes": classes,
        "kept": list(reviewed.lines.items()),
        "pixelated": spec.data.folder is None,
        "images": shown,
    }
    title = f"{title_of(spec.method)} on {spec.setting}"
    write_file(out, render_with_scripts("review.html", secrets.token_urlsafe(16), title=title, data=data))
    return len(cards)


def unlabeled_cards(reviewed: ReviewedRun, most: int | None = None) -> list[Card]:
    """Cards of the unlabeled images: first those most worth a label, then the least certain ones."""
    scores, uncertainty = reviewed.scores, reviewed.scores.uncertainty
    place = {row: number for number, row in enumerate(scores.rows.tolist())}
    first = [place[item.row] for item in suggest(reviewed, most or SUGGESTED)]
    order = torch.tensor(list(dict.fromkeys([*first, *uncertainty.argsort(descending=True, stable=True).tolist()]))[:most])
    values, classes = scores.probabilities[order].topk(min(SHOWN_CLASSES, len(reviewed.run.model.class_names)))
    columns = (scores.rows, uncertainty, scores.disagreement, scores.surprise)
    rows = zip(values.tolist(), classes.tolist(), *(column[order].tolist() for column in columns), strict=True)
    return [
        {
            "i": row,
            "n": reviewed.names[row],
            **({"l": ""} if reviewed.lines.get(reviewed.names[row]) == "" else {}),
            "c": best,
            "p": [round(value, 3) for value in probabilities],
            "u": round(uncertain, 4),
            "d": round(disagreement, 3),
            "s": round(surprise, 4),
        }
        for probabilities, best, row, uncertain, disagreement, surprise in rows
    ]


def labeled_cards(reviewed: ReviewedRun) -> list[Card]:
    """Cards of the images with a label."""
    run, cards = reviewed.run, list[Card]()
    for row in run.split.labeled.tolist():
        name, label = reviewed.names[row], run.data.train.class_names[int(run.data.train.labels[row])]
        by_directory = run.pictures.by_directory.get(name) if run.pictures else None if name in reviewed.lines else label
        cards.append({"i": row, "n": name, "l": label, "b": by_directory})
    return cards


def _thumbnails(reviewed: ReviewedRun, rows: list[int], progress: Progress | None) -> list[str]:
    """WebP pictures as data URLs; a folder's pictures are read again, because training images may be smaller."""
    folder = reviewed.run.record.spec.data.folder
    if folder is None:
        images = reviewed.run.data.train.images[rows]
    else:
        pixels, _ = decode_pictures([Path(folder) / reviewed.names[row] for row in rows], THUMBNAIL, 3, progress)
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    options = {"lossless": folder is None, "quality": 60, "method": 1}
    return [data_url(picture(image).convert("RGB"), "WEBP", **options) for image in images]
