"""Preflight: what was found in a folder of own pictures, what will be done with it, and what looks wrong. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from crmatch.data.folder.cache import Decoded
from crmatch.data.folder.scan import FolderIndex, SkippedFile, join_names

UNEVEN = 3
"""Labels of the largest class over those of the smallest, from which on it is worth a word."""
_NAMED = 50


class ClassCount(NamedTuple):
    """Readable pictures of one class."""

    name: str
    labeled: int
    test: int


class Duplicate(NamedTuple):
    """Pictures of the same pixels, each with its role and class (empty where unknown)."""

    paths: tuple[str, ...]
    roles: tuple[str, ...]
    classes: tuple[str, ...]

    @property
    def leaks(self) -> bool:
        """Whether a test picture is a training picture as well."""
        return len({*self.roles}) > 1 and "test" in self.roles

    @property
    def contradicts(self) -> bool:
        """Whether it is said to be of more than one class."""
        return len({*self.classes} - {""}) > 1


@dataclass(frozen=True)
class Preflight:
    """What there is to say about a folder before training on it.

    Attributes:
        folder: where it lies.
        classes: counts per class.
        unlabeled: how many unlabeled pictures can be read.
        test: how many test pictures can be read.
        channels: 1 where all pictures are gray, else 3.
        image_size: side of the images that are made of them.
        sizes: (width, height, count), the most frequent first.
        treatment: what happens to the pictures, in words.
        unreadable: pictures that cannot be read.
        skipped: other things that were found and are not used.
        duplicates: pictures that occur in more than one role, or labeled as more than one class.
        copies: how many pictures repeat another one of the same role and class.
        warnings: what looks wrong, in words.
    """

    folder: str
    classes: tuple[ClassCount, ...]
    unlabeled: int
    test: int
    channels: int
    image_size: int
    sizes: tuple[tuple[int, int, int], ...]
    treatment: str
    unreadable: tuple[SkippedFile, ...]
    skipped: tuple[SkippedFile, ...]
    duplicates: tuple[Duplicate, ...]
    copies: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        for key in ("classes", "unreadable", "skipped", "duplicates"):
            values[key] = [item._asdict() for item in getattr(self, key)]
        return values

    def lines(self, most: int = _NAMED) -> list[str]:
        """The report for people, with at most `most` names in each list."""
        labeled = sum(item.labeled for item in self.classes)
        kind = "gray" if self.channels == 1 else "color"
        lines = [
            f"{_line(self.folder)}: {labeled:,} labeled pictures of {len(self.classes)} classes, "
            f"{self.unlabeled:,} unlabeled, {self.test:,} for testing; {kind}",
            *(f"  {_line(item.name)}: {item.labeled:,} labeled, {item.test:,} for testing" for item in self.classes[:most]),
            *_rest(len(self.classes), most),
            self.treatment,
        ]
        for title, named in (("cannot be read", self.unreadable), ("not used", self.skipped)):
            if named:
                lines += [f"{title}: {len(named):,}", *(f"  {_line(item.path)}: {item.reason}" for item in named[:most])]
                lines += _rest(len(named), most)
        if self.duplicates:
            lines.append(f"same pixels: {len(self.duplicates):,}")
            lines += ["  " + " = ".join(map(_line, item.paths[:5])) for item in self.duplicates[:most]]
            lines += _rest(len(self.duplicates), most)
        return lines + [f"warning: {warning}" for warning in self.warnings]


def preflight(index: FolderIndex, decoded: Decoded) -> Preflight:
    """Look at a scanned folder and its decoded pictures (`read_folder`, or `FolderData.decoded`)."""
    labels, roles = index.labels[decoded.rows], index.roles[decoded.rows]
    counts = {role: np.bincount(labels[roles == role], minlength=len(index.class_names)) for role in ("labeled", "test")}
    numbers = zip(counts["labeled"].tolist(), counts["test"].tolist(), strict=True)
    classes = tuple(ClassCount(name, *pair) for name, pair in zip(index.class_names, numbers, strict=True))
    size = decoded.pixels.shape[1]
    sizes = Counter(zip(decoded.facts["width"].tolist(), decoded.facts["height"].tolist(), strict=True)).most_common()
    duplicates, copies = _duplicates(index, decoded, roles.tolist(), labels.tolist())
    result = Preflight(
        folder=str(index.folder),
        classes=classes,
        unlabeled=int((roles == "unlabeled").sum()),
        test=int((roles == "test").sum()),
        channels=decoded.pixels.shape[3],
        image_size=size,
        sizes=tuple((*shape, count) for shape, count in sizes),
        treatment=_treatment([shape for shape, _ in sizes], size),
        unreadable=tuple(SkippedFile(index.paths[row], reason) for row, reason in sorted(decoded.broken.items())),
        skipped=index.skipped,
        duplicates=duplicates,
        copies=copies,
        warnings=(),
    )
    return Preflight(**{**vars(result), "warnings": tuple(_warnings(index, result))})


def _treatment(shapes: Sequence[tuple[int, int]], size: int) -> str:
    end = f"{size}x{size}"
    if len(shapes) == 1:
        width, height = shapes[0]
        start = f"{width}x{height}"
        if start == end:
            return f"all pictures are {end} and used as they are"
        steps = [*(["resized"] if min(width, height) != size else []), *(["center-cropped"] if width != height else [])]
        return f"all pictures are {' and '.join(steps)} from {start} to {end}"
    smallest, largest = (f"{width}x{height}" for width, height in (min(shapes, key=np.prod), max(shapes, key=np.prod)))
    return (
        f"{len(shapes):,} different sizes from {smallest} to {largest}: "
        f"resized to a shorter side of {size}, then center-cropped to {end}"
    )


def _duplicates(index: FolderIndex, decoded: Decoded, roles: list[str], labels: list[int]) -> tuple[tuple[Duplicate, ...], int]:
    same: dict[int, list[int]] = defaultdict(list)
    _, digests, counts = np.unique(decoded.facts["digest"], return_inverse=True, return_counts=True)
    for row in np.flatnonzero(counts[digests] > 1).tolist():
        same[int(digests[row])].append(row)
    names = (*index.class_names, "")  # UNLABELED is the last
    found, copies = [], 0
    for rows in same.values():
        kinds = {(roles[row], labels[row]) for row in rows}
        copies += len(rows) - len(kinds)
        if len(kinds) > 1:
            paths = tuple(index.paths[decoded.rows[row]] for row in rows)
            found.append(Duplicate(paths, tuple(roles[row] for row in rows), tuple(names[labels[row]] for row in rows)))
    return tuple(found), copies


def _warnings(index: FolderIndex, found: Preflight) -> list[str]:
    labels = {item.name: item.labeled for item in found.classes}
    few, many = min(labels.values()), max(labels.values())

    def classes(count: int) -> str:
        return join_names(name for name, labeled in labels.items() if labeled == count)

    leaks = sum(item.leaks for item in found.duplicates)
    torn = sum(item.contradicts for item in found.duplicates)
    both = sum({"labeled", "unlabeled"} <= {*item.roles} for item in found.duplicates)
    untested = [item.name for item in found.classes if not item.test] if found.test else []
    small = sum(count for width, height, count in found.sizes if 2 * min(width, height) < found.image_size)
    long = sum(count for width, height, count in found.sizes if max(width, height) > 2 * min(width, height))
    others = [f"{count:,} {ending or 'without extension'}" for ending, count in index.ignored.items() if ending != ".csv"]
    said = [
        (few == 0, f"no labeled picture of {classes(0)} can be read: training refuses that"),
        (1 in labels.values(), f"one label only for {classes(1)}: a second one would help most"),
        (many >= UNEVEN * max(few, 1), f"uneven labels: {many:,} for {classes(many)}, {few:,} for {classes(few)}"),
        (not found.unlabeled, "no unlabeled pictures: put some into unlabeled/, or use the labeled ones as unlabeled too"),
        (not found.test, "no test/<class>/ folder: the error of the model cannot be measured"),
        (bool(untested), f"no test pictures of {join_names(untested)}"),
        (bool(found.unreadable), f"pictures that cannot be read and are left out: {len(found.unreadable):,}"),
        (bool(leaks), f"test pictures that are training pictures too: {leaks:,}; the test error will look too good"),
        (bool(torn), f"pictures with contradicting labels: {torn:,}"),
        (bool(both), f"labeled pictures that are among the unlabeled ones too: {both:,}"),
        (bool(found.copies), f"pictures that repeat another one of the same kind: {found.copies:,}"),
        (bool(small), f"pictures enlarged more than twofold: {small:,}; a smaller --image-size would lose nothing of them"),
        (bool(long), f"pictures of which center-cropping takes more than half: {long:,}"),
        (bool(others), f"files of other kinds, ignored: {join_names(others)}"),
    ]
    return [text for applies, text in said if applies]


def _line(name: str) -> str:
    """A name on one line, without control characters."""
    return name if name.isprintable() else ascii(name)[1:-1]


def _rest(count: int, most: int) -> list[str]:
    return [f"  and {count - most:,} more"] if count > most else []
