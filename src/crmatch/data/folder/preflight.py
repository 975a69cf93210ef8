"""Report on a folder of pictures before training: its content, how it will be used, and likely problems. Imports no torch."""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from crmatch.atomic_files import checksum
from crmatch.data.folder.cache import Decoded, decode_folder
from crmatch.data.folder.decode import HEIC_EXTENSIONS
from crmatch.data.folder.hold_out import held_out_counts
from crmatch.data.folder.scan import HELD_OUT_FILE, FolderIndex, SkippedFile, join_names, scan_folder
from crmatch.data.folder.workers import Progress
from crmatch.data.settings import default_data_dir
from crmatch.errors import printable

UNEVEN = 3
"""A warning is given if the largest class has this many times the labels of the smallest."""


@dataclass(frozen=True)
class ClassCount:
    """Readable pictures of one class."""

    name: str
    labeled: int
    test: int


@dataclass(frozen=True)
class Duplicate:
    """Pictures with the same pixels, each with its role and class (empty if unknown)."""

    paths: tuple[str, ...]
    roles: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Preflight:
    """The report on a folder; pictures that cannot be read are not counted."""

    folder: str
    classes: tuple[ClassCount, ...]
    unlabeled: int
    test: int
    channels: int
    image_size: int
    sizes: tuple[tuple[int, int, int], ...]  # (width, height, count), most frequent first
    treatment: str  # what is done with the pictures
    unreadable: tuple[SkippedFile, ...]
    skipped: tuple[SkippedFile, ...]  # other files and directories that are not used
    duplicates: tuple[Duplicate, ...]  # pictures with more than one role or class
    copies: int  # pictures that repeat another one of the same role and class
    warnings: tuple[str, ...] = ()

    def lines(self, most: int = 50) -> list[str]:
        """The report as text, with at most `most` names in each list."""
        labeled = sum(item.labeled for item in self.classes)
        lines = [
            f"{printable(self.folder)}: {labeled:,} labeled pictures of {len(self.classes)} classes, "
            f"{self.unlabeled:,} unlabeled, {self.test:,} for testing; {'gray' if self.channels == 1 else 'color'}"
        ]

        def add(rows: list[str]) -> None:
            lines.extend(f"  {row}" for row in rows[:most])
            lines.extend([f"  and {len(rows) - most:,} more"] if len(rows) > most else [])

        add([f"{printable(item.name)}: {item.labeled:,} labeled, {item.test:,} for testing" for item in self.classes])
        lines.append(self.treatment)
        for title, files in (("cannot be read", self.unreadable), ("not used", self.skipped)):
            if files:
                lines.append(f"{title}: {len(files):,}")
                add([f"{printable(item.path)}: {item.reason}" for item in files])
        if self.duplicates:
            lines.append(f"identical pictures: {len(self.duplicates):,}")
            add([" = ".join(map(printable, item.paths[:5])) for item in self.duplicates])
        return lines + [f"warning: {warning}" for warning in self.warnings]

    def short_lines(self) -> list[str]:
        """The report in two lines."""
        warnings = {0: "no warnings", 1: "1 warning"}.get(len(self.warnings), f"{len(self.warnings)} warnings")
        return [self.lines()[0], f"{warnings}; the whole report: crmatch data check {shlex.quote(self.folder)}"]

    def is_new(self, data_dir: Path | None = None) -> bool:
        """Whether the report on this folder is shown for the first time; remembered beside the decoded pictures."""
        shown = (data_dir or default_data_dir()) / "folders" / f"{checksum(self.folder.encode())}.shown"
        is_new = not shown.exists()
        with contextlib.suppress(OSError):
            shown.touch()
        return is_new


def check_folder(
    folder: Path,
    image_size: int | None = None,
    data_dir: Path | None = None,
    labels_file: Path | None = None,
    progress: Progress | None = None,
    advise_size: bool = True,
) -> Preflight:
    """Scan a folder, decode its pictures and report on them; arguments as for `load_folder`.

    `advise_size`: whether to warn about pictures that are much smaller than `image_size`.
    """
    index = scan_folder(folder, labels_file)
    return preflight(index, decode_folder(index, image_size, data_dir, progress), advise_size)


def preflight(index: FolderIndex, decoded: Decoded, advise_size: bool = True) -> Preflight:
    """The report on a scanned folder and its decoded pictures."""
    labels, roles = index.labels[decoded.rows], index.roles[decoded.rows]
    counts = [np.bincount(labels[roles == role], minlength=len(index.class_names)).tolist() for role in ("labeled", "test")]
    sizes = Counter(zip(decoded.facts["width"].tolist(), decoded.facts["height"].tolist(), strict=True)).most_common()
    duplicates, copies = _duplicates(index, decoded, roles.tolist(), labels.tolist())
    report = Preflight(
        folder=str(index.folder),
        classes=tuple(ClassCount(*values) for values in zip(index.class_names, *counts, strict=True)),
        unlabeled=int((roles == "unlabeled").sum()),
        test=int((roles == "test").sum()),
        channels=decoded.pixels.shape[3],
        image_size=decoded.pixels.shape[1],
        sizes=tuple((*shape, count) for shape, count in sizes),
        treatment=_treatment([shape for shape, _ in sizes], decoded.pixels.shape[1]),
        unreadable=tuple(SkippedFile(index.paths[row], reason) for row, reason in sorted(decoded.broken.items())),
        skipped=index.skipped,
        duplicates=duplicates,
        copies=copies,
    )
    return replace(report, warnings=tuple(_warnings(index, report, advise_size)))


def _treatment(shapes: Sequence[tuple[int, int]], size: int) -> str:
    names = [f"{width}x{height}" for width, height in sorted(shapes, key=np.prod)]
    steps = ["resized"] if any(min(shape) != size for shape in shapes) else []
    steps += ["center-cropped"] if any(width != height for width, height in shapes) else []
    start = names[0] if len(names) == 1 else f"{len(names):,} different sizes ({names[0]} to {names[-1]})"
    done = f"{' and '.join(steps)} from {start} to {size}x{size}" if steps else f"used as they are ({start})"
    return f"pictures are {done}"


def _duplicates(index: FolderIndex, decoded: Decoded, roles: list[str], labels: list[int]) -> tuple[tuple[Duplicate, ...], int]:
    """Identical pictures of different role or class, and the number of copies of the same role and class."""
    same: dict[int, list[int]] = defaultdict(list)
    _, digests, counts = np.unique(decoded.facts["digest"], return_inverse=True, return_counts=True)
    for row in np.flatnonzero(counts[digests] > 1).tolist():
        if roles[row] != "left out":
            same[int(digests[row])].append(row)
    names = (*index.class_names, "")  # index -1, UNLABELED, is the empty name
    found, copies = [], 0
    for rows in same.values():
        kinds = {(roles[row], labels[row]) for row in rows}
        copies += len(rows) - len(kinds)
        if len(kinds) > 1:
            paths = tuple(index.paths[decoded.rows[row]] for row in rows)
            found.append(Duplicate(paths, tuple(roles[row] for row in rows), tuple(names[labels[row]] for row in rows)))
    return tuple(found), copies


def _warnings(index: FolderIndex, report: Preflight, advise_size: bool) -> list[str]:
    labels = {item.name: item.labeled for item in report.classes}
    few, many = min(labels.values()), max(labels.values())

    def classes(count: int) -> str:
        return join_names(name for name, labeled in labels.items() if labeled == count)

    def pictures(count: int) -> str:
        return "1 picture" if count == 1 else f"{count:,} pictures"

    leaks = sum("test" in item.roles and len({*item.roles}) > 1 for item in report.duplicates)
    contradictions = sum(len({*item.classes} - {""}) > 1 for item in report.duplicates)
    both = sum({"labeled", "unlabeled"} <= {*item.roles} for item in report.duplicates)
    left_out = int((index.roles == "left out").sum())
    untested = [item.name for item in report.classes if not item.test] if report.test else []
    tiny = [count for width, height, count in report.sizes if 2 * min(width, height) < report.image_size]
    small = sum(tiny) if advise_size else 0
    long = sum(count for width, height, count in report.sizes if max(width, height) > 2 * min(width, height))
    heic = sum(index.ignored.get(ending, 0) for ending in HEIC_EXTENSIONS)
    known = {".csv", *HEIC_EXTENSIONS}
    others = [f"{count:,} {ending or 'without extension'}" for ending, count in index.ignored.items() if ending not in known]
    same = Counter(name.casefold() for name in labels)
    alike = [name for name in labels if same[name.casefold()] > 1]
    to_hold_out = sum(held_out_counts(index))
    warnings = [
        (heic, f"{pictures(heic)} of an iPhone (.heic) cannot be read: pip install 'crmatch[heic]'"),
        (alike, f"classes whose names differ only in case: {join_names(alike)}. If they are the same, use one name"),
        (few == 0, f"no labeled picture of {classes(0)} can be read: training is not possible"),
        (1 in labels.values(), f"only one label for {classes(1)}: a second one would help most"),
        (
            many >= UNEVEN * max(few, 1),
            f"uneven labels: {many:,} for {classes(many)}, {few:,} for {classes(few)}. If every class matters equally, add "
            "--set data.balance=true",
        ),
        (not report.unlabeled, "no unlabeled pictures: the labeled ones are used as unlabeled ones, too"),
        (
            not report.test,
            f"no test/<class>/ folder: crmatch train holds out {pictures(to_hold_out)} with labels ({HELD_OUT_FILE})"
            if to_hold_out
            else "no test/<class>/ folder: the error of the model cannot be measured, or only estimated",
        ),
        (untested, f"no test pictures of {join_names(untested)}"),
        (left_out, f"{pictures(left_out)} left out by labels.csv"),
        (report.unreadable, f"{pictures(len(report.unreadable))} cannot be read and will be left out"),
        (leaks, f"{pictures(leaks)} in test/ also in the training set: the test error will look too good"),
        (contradictions, f"{pictures(contradictions)} with contradicting labels"),
        (both, f"{pictures(both)} both labeled and unlabeled"),
        (report.copies, f"{pictures(report.copies)} repeated within the same role and class"),
        (small, f"{pictures(small)} enlarged more than twofold: a smaller --image-size would lose nothing of them"),
        (long, f"{pictures(long)} with more than half lost to the center crop"),
        (others, f"files of other kinds are ignored: {join_names(others)}"),
    ]
    return [text for applies, text in warnings if applies]
