"""Scanning of a folder of pictures: which files there are, and their labels. Imports no torch.

The order of the pictures depends on their paths only, not on labels.csv, so that new labels do not change decoded pixels.
"""

from __future__ import annotations

import csv
import io
import os
import posixpath
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crmatch.atomic_files import read_file
from crmatch.data.folder.decode import EXTENSIONS, HEIC_EXTENSIONS
from crmatch.data.spreadsheet import unguarded
from crmatch.errors import DataError, RequestError, printable

LABELS_FILE = "labels.csv"
METADATA_FILE = "metadata.csv"  # the same in Hugging Face's image folders, at the top or in train/ and test/
HELD_OUT_FILE = "held-out.csv"  # labeled pictures that serve as the test set, see hold_out.py
TEST_FOLDERS = ("test", "val", "valid", "validation")
COLUMNS = {"file_name": "path", "class": "label"}  # other names of the columns of a labels file
MOST_BYTES = 64 << 20  # of a labels file: a million pictures
SYSTEM = ("/", "/dev", "/proc", "/sys")  # are not searched for pictures
UNLABELED, LEFT_OUT = -1, -2  # as in `crmatch.data.images`, which imports torch
LEAVE_OUT = "-"
"""In labels.csv: a picture that is not used, neither as a labeled nor as an unlabeled one."""


@dataclass(frozen=True, order=True)
class SkippedFile:
    """A file or directory that is not used, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class FolderIndex:
    """The pictures of a folder, ordered: those in class directories by class and path, the others by path, the test set."""

    folder: Path
    class_names: tuple[str, ...]  # sorted
    paths: tuple[str, ...]  # relative to the folder, with slashes
    labels: NDArray[np.int64]  # (N,), -1 if unknown, -2 if left out
    training: int  # how many of the pictures are for training; the others are the test set
    stats: NDArray[np.int64]  # (N, 3): size in bytes, mtime and ctime in ns
    skipped: tuple[SkippedFile, ...]  # files and directories that are not used
    ignored: dict[str, int]  # number of files with each other extension
    by_directory: dict[str, str]  # path -> class of the pictures in labeled/, whatever labels.csv says

    @property
    def roles(self) -> NDArray[np.str_]:
        """`labeled`, `unlabeled`, `left out` or `test`, by path."""
        roles = np.select([self.labels == UNLABELED, self.labels == LEFT_OUT], ["unlabeled", "left out"], "labeled")
        roles[self.training :] = "test"
        return roles


def scan_folder(folder: Path, labels_file: Path | None = None, trainable: bool = True) -> FolderIndex:
    """Find the pictures of a folder and their labels.

    Class directories are in `labeled/`, in `train/` or at the top; `unlabeled/` and `test/<class>/` (or `val/<class>/`) may be
    beside them. Or all pictures are in one heap that a file labels: `labels.csv` with the columns `path,label`, or
    `metadata.csv`. A given labels file replaces the folder's own, and overrides the directories; an empty label changes
    nothing, and `-` leaves the picture out. Pictures in `held-out.csv` belong to the test set. A folder that is not `trainable`
    may have too few classes, or no labels at all.
    """
    folder = Path(os.path.abspath(folder))
    if not os.path.isdir(folder):  # unlike `Path.is_dir`, also False for a name that is too long
        raise RequestError(f"there is no folder {folder}.\nName a folder that contains labeled/<class>/ and unlabeled/.")
    if str(folder.resolve()) in SYSTEM:
        raise RequestError(f"{folder} belongs to the system.\nName a folder that contains only your pictures.")
    own = (folder / place for place in (LABELS_FILE, METADATA_FILE, f"train/{METADATA_FILE}"))
    file = labels_file or next((place for place in own if place.is_file()), None)
    if file is not None:
        label_lines(file)  # a damaged file is found before the walk, which may take long
    walk, class_of = _walk_layout(folder, file, trainable)
    test = {path: name for path, name in class_of["test"].items() if name}
    for place in (folder / HELD_OUT_FILE, *(folder / name / METADATA_FILE for name in TEST_FOLDERS)):
        test |= _read_labels(place, walk, {}) if place.is_file() else {}
    given = _read_labels(file, walk, test) if file is not None else {}
    test |= {path: given.pop(path) for path in class_of["test"] if given.get(path, LEAVE_OUT) != LEAVE_OUT}
    labels = {path: name for path, name in class_of["labeled"].items() if name and path not in test} | given
    for path in [path for role in class_of.values() for path in role if path not in labels and path not in test]:
        walk.skip(path, "not in a class directory")
        del walk.files[path]
    if trainable:
        _check_classes(folder, labels, test)
    elif not walk.files:
        raise DataError(f"{folder} has no pictures.\nName a folder of JPEG, PNG or other picture files.")

    def position(path: str) -> tuple[int, str, str]:
        if path in test:
            return 2, test[path], path
        return (0, class_of["labeled"][path], path) if path in class_of["labeled"] else (1, "", path)

    paths = sorted(walk.files, key=position)
    names = sorted({*labels.values(), *test.values()} - {LEAVE_OUT})
    number = {LEAVE_OUT: LEFT_OUT, **{name: label for label, name in enumerate(names)}}
    known = labels | test
    return FolderIndex(
        folder=folder,
        class_names=tuple(names),
        paths=tuple(paths),
        labels=np.array([number[known[path]] if path in known else UNLABELED for path in paths], np.int64),
        training=len(paths) - len(test),
        stats=np.array([walk.files[path] for path in paths], np.int64),
        skipped=tuple(sorted(walk.skipped)),
        ignored=dict(walk.ignored),
        by_directory=class_of["labeled"],
    )


def _walk_layout(folder: Path, file: Path | None, trainable: bool) -> tuple[_Walk, dict[str, dict[str, str]]]:
    """All pictures, and the class by path of those in the `labeled` and `test` parts; empty if not in a class directory."""
    walk, parts = _Walk(folder), _directories(folder)
    roles = _roles(folder, parts, file)
    for name in [""] if "" in roles else parts:
        if roles.get(name):
            walk.walk(name)
        else:
            walk.skip(name, "neither labeled/, unlabeled/ nor test/")
    walk.check_heic()
    class_of: dict[str, dict[str, str]] = {"labeled": {}, "test": {}}
    for path in walk.files:
        part, *below = path.split("/", 2)
        role = roles.get(part)
        if role == "class":
            class_of["labeled"][path] = part
        elif role in ("labeled", "test"):
            class_of[role][path] = below[0] if len(below) == 2 else ""
    if not roles.keys() & {"", "labeled", "train"} and len({*class_of["labeled"].values()}) < 2:
        if not trainable:  # to be labeled
            walk = _Walk(folder)
            walk.walk("")
            walk.check_heic()
            return walk, {"labeled": {}, "test": {}}
        found = f"neither class folders nor labeled/ nor {LABELS_FILE} (directories found: {join_names(parts) or 'none'})"
        raise DataError(
            f"{folder} has {found}.\n"
            f"Put labeled pictures into labeled/<class>/ and the others into unlabeled/, or write {LABELS_FILE}: path,label"
        )
    return walk, class_of


def _roles(folder: Path, parts: list[str], file: Path | None) -> dict[str, str]:
    """Directory at the top -> `labeled`, `unlabeled`, `test`, or `class` if it is a class itself; others are not used.

    The directory "" stands for everything: a file labels a heap of pictures, and no directory is named after one of its labels.
    """
    if "labeled" in parts:
        return {name: name for name in ("labeled", "unlabeled", "test")}
    others = ("unlabeled", *TEST_FOLDERS)
    classes = {*_directories(folder / "train")} if "train" in parts else {*parts}.difference(others)
    labels = {label for _, label in label_lines(file) if label not in ("", LEAVE_OUT)} if file else set()
    if file and (file.name == METADATA_FILE or (labels.isdisjoint(classes) and (labels or "unlabeled" not in parts))):
        return {"": "unlabeled", "test": "test"}
    roles = {"train": "labeled"} if "train" in parts else dict.fromkeys(classes, "class")
    # Without class directories, a test folder holds pictures of unknown classes, as in competitions.
    roles |= dict.fromkeys(others, "unlabeled")
    tests = [name for name in TEST_FOLDERS if name in parts and not classes.isdisjoint(_directories(folder / name))]
    return roles | dict.fromkeys(tests, "") | dict.fromkeys(tests[:1], "test")


def find_pictures(folder: Path) -> list[Path]:
    """All picture files below a folder, sorted; hidden files and unreadable directories are left out."""
    walk = _Walk(folder)
    walk.walk("")
    walk.check_heic()
    return [folder / path for path in sorted(walk.files)]


def _check_classes(folder: Path, labels: dict[str, str], test: dict[str, str]) -> None:
    found = {*labels.values()} - {LEAVE_OUT}
    if (folder / "labeled").is_dir() and (empty := {*_directories(folder / "labeled")} - found):
        advice = "Add one of each class, or remove the directory."
        raise DataError(f"{folder / 'labeled'} has no pictures of {join_names(empty)}.\n{advice}")
    if not found:
        advice = f"Put a few of each class into labeled/<class>/, or list them in {LABELS_FILE}."
        raise DataError(f"{folder} has no labeled pictures.\n{advice}")
    if len(found) == 1:
        raise DataError(f"{folder} has only one class: {join_names(found)}.\nLabel pictures of at least one other class.")
    if strange := {*test.values()} - found:
        advice = f"Labeled classes: {join_names(found, 20)}"
        raise DataError(f"{folder / 'test'} has classes without labeled pictures: {join_names(strange)}.\n{advice}")


def _directories(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.\nMake it readable, or copy the pictures.") from error


class _Walk:
    """All picture files below a folder. Follows links to directories, each target once and never in a circle."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, tuple[int, int, int]] = {}  # relative path -> size in bytes, mtime and ctime in ns
        self.skipped: list[SkippedFile] = []
        self.ignored: Counter[str] = Counter()
        self._linked: set[tuple[int, int]] = set()

    def walk(self, top: str) -> None:
        waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [(top, (_identity(os.stat(self.root)),))]
        while waiting:
            relative, ancestors = waiting.pop()
            try:
                ancestors = (*ancestors, _identity(os.stat(self.root / relative)))
                with os.scandir(self.root / relative) as found:  # only directories are kept: entries take much memory
                    directories = [entry for entry in found if entry.name[0] != "." and self._visit(entry, relative)]
            except OSError as error:
                self.skip(relative or ".", str(error.strerror).lower())
                continue
            for entry in sorted(directories, key=lambda entry: entry.name):
                path = posixpath.join(relative, entry.name)
                try:
                    target = _identity(entry.stat())
                except OSError as error:  # it was removed meanwhile
                    self.skip(path, str(error.strerror).lower())
                    continue
                if entry.is_symlink() and (target in ancestors or target in self._linked):
                    self.skip(path, "a circular link" if target in ancestors else "a second link to the same directory")
                    continue
                if entry.is_symlink():
                    self._linked.add(target)
                waiting.append((path, ancestors))

    def check_heic(self) -> None:
        """A folder that has only pictures of an iPhone needs the extra `heic`."""
        if not self.files and (count := sum(self.ignored[ending] for ending in HEIC_EXTENSIONS)):
            found = f"the pictures in {self.root} are those of an iPhone ({count:,} .heic), which cannot be read"
            raise DataError(f"{found}.\nInstall what reads them: pip install 'crmatch[heic]'")

    def skip(self, path: str, reason: str) -> None:
        self.skipped.append(SkippedFile(path.encode("utf-8", "backslashreplace").decode(), reason))

    def _visit(self, entry: os.DirEntry[str], relative: str) -> bool:
        """Record a picture; returns whether `entry` is a directory."""
        path = f"{relative}/{entry.name}" if relative else entry.name
        try:
            if entry.is_dir():
                return True
            ending = os.path.splitext(entry.name)[1].lower()
            if ending not in EXTENSIONS:
                self.ignored[ending] += 1
                return False
            status = entry.stat()
        except OSError as error:
            self.skip(path, "a broken link" if entry.is_symlink() else str(error.strerror).lower())
            return False
        if not stat.S_ISREG(status.st_mode):
            self.skip(path, "not a regular file")
        elif not path.isascii() and path.encode("utf-8", "replace").decode() != path:
            self.skip(path, "the name is not UTF-8")
        else:
            self.files[path] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def join_names(names: Iterable[str], most: int = 5) -> str:
    """Sorted names on one line for a message, with at most `most` of them."""
    shown = [printable(name) for name in sorted(names)]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def _read_labels(file: Path, walk: _Walk, test: dict[str, str]) -> dict[str, str]:
    """Labels by path from a CSV file with the columns `path` and `label`; other columns and empty labels are ignored."""
    composed = {unicodedata.normalize("NFC", path): path for path in walk.files}
    labels: dict[str, str] = {}
    missing = []
    beside = "" if file.name != METADATA_FILE else posixpath.join(os.path.relpath(file.parent, walk.root), "")
    for path, label in label_lines(file):
        path = posixpath.normpath(beside + path) if beside else path
        place = path if path in walk.files else composed.get(normalized(path, walk.root))
        if place is None:
            missing.append(path)
        elif labels.setdefault(place, label) != label:
            raise DataError(f"{file} labels {path} twice: {labels[place]!r} and {label!r}.\nKeep one of the lines.")
        elif label and label != test.get(place, label):
            reason = f"labels {path} as {label!r}, but it is a test picture of {test[place]!r}"
            raise DataError(f"{file} {reason}.\nMove the picture, or correct {HELD_OUT_FILE}, instead.")
    if missing:
        raise DataError(
            f"{file} lists pictures that are not in {walk.root} ({len(missing)}): {join_names(missing, 3)}.\n"
            "Paths are relative to the folder; remove the lines of deleted pictures."
        )
    return {path: label for path, label in labels.items() if label and path not in test}


def label_lines(file: Path) -> list[tuple[str, str]]:
    """(path, label) of each line of a CSV file with these columns; a label may be empty."""
    try:
        if file.is_file() and file.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{file} has more than {MOST_BYTES >> 20} MB.\nA line is a path and a label; remove what else it has."
            )
        text = io.TextIOWrapper(io.BytesIO(read_file(file)), "utf-8-sig", newline="")  # decoded in pieces
        delimiter = ";" if ";" in text.readline() else ","
        text.seek(0)
        rows = (row for row in csv.reader(text, delimiter=delimiter) if row)
        header = [COLUMNS.get(name, name) for name in (cell.strip().lower() for cell in next(rows, []))]
        if not {"path", "label"} <= {*header}:
            found = join_names(header) or "empty"
            raise DataError(f"{file} has no header path,label (first line: {found}).\nAdd it as the first line.")
        columns = [header.index(name) for name in ("path", "label")]
        lines = [[unguarded(row[column].strip()) if column < len(row) else "" for column in columns] for row in rows]
    except FileNotFoundError as error:
        raise RequestError(f"there is no labels file {file}.\nIt needs a header path,label and a line per picture.") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.\nName a CSV file that you may read.") from error
    except (UnicodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {str(error).splitlines()[0]}.\nSave it as CSV in UTF-8.") from error
    return [(path, label) for path, label in lines if path]


def normalized(path: str, folder: Path) -> str:
    """A path as other programs write it (backslashes, `./`, absolute, decomposed accents) in the form used here."""
    path = posixpath.normpath(path.replace("\\", "/"))
    return unicodedata.normalize("NFC", posixpath.relpath(path, folder) if path.startswith("/") else path)
