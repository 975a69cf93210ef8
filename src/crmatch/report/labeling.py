"""Labeling a folder of pictures in a browser: every choice is written to labels.csv before it is confirmed."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from typing import Annotated

import torch
from PIL import ImageOps
from pydantic import Field

from crmatch.data.folder.decode import flat, open_picture
from crmatch.data.folder.labels_file import change_labels, read_labels
from crmatch.data.folder.load import FolderData, load_folder
from crmatch.data.folder.scan import LEAVE_OUT
from crmatch.data.folder.workers import Progress
from crmatch.data.images import LEFT_OUT
from crmatch.errors import RequestError
from crmatch.predict.label_suggestions import ReviewedRun
from crmatch.randomness import generator
from crmatch.report.review import Card, render_with_scripts, unlabeled_cards
from crmatch.report.server import Answer, json_answer
from crmatch.strict_model import StrictModel

SIDES = {"thumbnail": 256, "picture": 1600}
"""Longer side in pixels of the pictures that are served."""
LONGEST_NAME = 100
SMALL = 32
"""Size at which pictures are decoded to find unreadable and identical ones if there is no model yet."""


class Choice(StrictModel):
    """A request: give pictures (rows) a class, `-` to leave them out, an empty label if unsure, None for no label."""

    label: str | None
    pictures: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]


def read_folder(folder: Path, file: Path, data_dir: Path, size: int | None, progress: Progress | None = None) -> FolderData:
    """The pictures of a folder with the labels of `file`, which may not exist yet."""
    return load_folder(folder, size or SMALL, data_dir, file if file.is_file() else None, progress, trainable=False)


class LabelingSite:
    """The page for a folder of pictures, with the suggestions of a run if there is one."""

    most_bytes = 1 << 20

    def __init__(self, folder: Path, file: Path, pictures: FolderData, reviewed: ReviewedRun | None, next_command: str) -> None:
        self.changed: dict[int, str | None] = {}  # row -> label, of the pictures that were labeled here
        self.next_command = next_command
        self._folder, self._file, self._names, self._lock = folder, file, pictures.train_paths, threading.Lock()
        train, lines = pictures.train, read_labels(file, folder, pictures.train_paths)
        known = reviewed.run.model.class_names if reviewed else ()
        self._classes = list(dict.fromkeys([*known, *train.class_names]))
        predicted = {card["i"]: card for card in unlabeled_cards(reviewed)} if reviewed else {}
        # Without a model the order is random, so that pictures taken one after another do not come together.
        rows = [*predicted, *torch.randperm(len(train), generator=generator(0, "labeling")).tolist()]
        self._cards: dict[int, Card] = {}
        for row in dict.fromkeys(rows):
            name, label = self._names[row], int(train.labels[row])
            card = {"i": row, "n": name, "b": pictures.by_directory.get(name), **predicted.get(row, {})}
            card["l"] = LEAVE_OUT if label == LEFT_OUT else train.class_names[label] if label >= 0 else lines.get(name)
            self._cards[row] = card
        for group, contradicting in enumerate(contradictions(pictures)):
            for row in contradicting:
                self._cards[row]["x"] = group

    def get(self, path: str, nonce: str) -> Answer | None:
        """The page, or a picture by its number."""
        if not path:
            with self._lock:
                cards = sorted(self._cards.values(), key=lambda card: card["l"] is not None)  # the unlabeled ones come first
                data = {"live": True, "classes": self._classes, "images": cards}
                return Answer(
                    render_with_scripts("review.html", nonce, title=self._folder.name, data=data), "text/html; charset=utf-8"
                )
        found = re.fullmatch(r"(thumbnail|picture)/(\d{1,9})", path)
        if not found or int(found[2]) >= len(self._names):
            return None
        return Answer(_encoded(self._folder / self._names[int(found[2])], SIDES[found[1]]), "image/jpeg")

    def post(self, path: str, body: bytes) -> Answer | None:
        """Write labels, or end."""
        if path == "done":
            return json_answer({"next": self.next_command}, last=True)
        if path != "labels":
            return None
        choice = Choice.model_validate_json(body)
        label = self._checked(choice)
        with self._lock:
            known = {} if self._file.exists() else self._known_labels()
            change_labels(self._file, self._folder, known | {self._names[row]: label for row in choice.pictures})
            self.changed |= dict.fromkeys(choice.pictures, label)
            for card in (self._cards[row] for row in choice.pictures):
                card["l"] = card["b"] if label is None else label
            if label and label not in (LEAVE_OUT, *self._classes):
                self._classes.append(label)
        return json_answer({"written": len(choice.pictures)})

    def _known_labels(self) -> dict[str, str | None]:
        """Labels that a new labels.csv must repeat, because it replaces class directories at the top and metadata.csv."""
        if (self._folder / "labeled").is_dir():
            return {}
        return {card["n"]: card["l"] for card in self._cards.values() if card["l"]}

    def close(self) -> None:
        """Wait until the last choice is written."""
        self._lock.acquire()

    def summary(self) -> str:
        """How many pictures were labeled here, in words."""
        labels = list(self.changed.values())
        counts = {"not sure": labels.count(""), "left out": labels.count(LEAVE_OUT), "without a label": labels.count(None)}
        counts = {"labeled": len(labels) - sum(counts.values()), **counts}
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "nothing was labeled"

    def _checked(self, choice: Choice) -> str | None:
        label = None if choice.label is None else choice.label.strip()
        if unknown := [row for row in choice.pictures if row not in self._cards]:
            raise RequestError(f"there is no picture {unknown[0]}.")
        if label is not None and (not label.isprintable() or len(label) > LONGEST_NAME):
            raise RequestError(f"{label[:LONGEST_NAME]!r} cannot be the name of a class: use up to {LONGEST_NAME} characters.")
        if label == "" and (fixed := [row for row in choice.pictures if self._cards[row]["b"]]):
            raise RequestError(f"{self._names[fixed[0]]} has its class from its directory. Leave it out instead.")
        return label


def contradictions(pictures: FolderData) -> list[set[int]]:
    """Rows of training pictures with the same pixels and different classes."""
    groups: dict[int, set[int]] = defaultdict(set)
    labels = pictures.train.labels.tolist()
    for row, digest in enumerate(pictures.decoded.facts["digest"][: len(labels)].tolist()):
        if labels[row] >= 0:
            groups[digest].add(row)
    return [rows for rows in groups.values() if len({labels[row] for row in rows}) > 1]


def _encoded(path: Path, side: int) -> bytes:
    """A picture as JPEG, upright and at most `side` pixels long. Files are never served as they are."""
    content = BytesIO()
    with open_picture(path) as picture:
        picture.draft(None, (side, side))  # JPEG files are then decoded at a fraction of their size
        with contextlib.suppress(Exception):  # damaged EXIF data do not affect the pixels
            ImageOps.exif_transpose(picture, in_place=True)
        shown = flat(picture).convert("RGB")
        shown.thumbnail((side, side))
        shown.save(content, "JPEG", quality=88)
    return content.getvalue()
