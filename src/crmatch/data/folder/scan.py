"""Own pictures: a folder in; out come an index of its pictures and, decoded, image sets. Scanning imports no torch.

The order of the pictures depends on where they lie, never on labels.csv, so that correcting labels decodes nothing again.
"""

from __future__ import annotations

import csv
import io
import os
import posixpath
import stat
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crmatch.data.folder.cache import Decoded, Listing, cached_pixels
from crmatch.data.folder.decode import Progress
from crmatch.errors import DataError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from crmatch.data.images import ImageSet

EXTENSIONS = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"))
LABELS_FILE = "labels.csv"
UNLABELED = -1


class SkippedFile(NamedTuple):
    """A file or directory that is not used, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class FolderIndex:
    """The pictures of a folder.

    Attributes:
        folder: where they lie.
        class_names: sorted by name.
        paths: relative, with slashes; first those in labeled/ by class and path, then the others by path, then test/.
        labels: int64 (N,), -1 where unknown.
        training: how many of the paths are training pictures; the rest is the test set.
        stats: int64 (N, 3): bytes, time of the last change of content, and of anything, in ns.
        skipped: what was found but is not used.
        ignored: how many files there are with each other extension.
    """

    folder: Path
    class_names: tuple[str, ...]
    paths: tuple[str, ...]
    labels: NDArray[np.int64]
    training: int
    stats: NDArray[np.int64]
    skipped: tuple[SkippedFile, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)

    @property
    def roles(self) -> NDArray[np.str_]:
        """`labeled`, `unlabeled` or `test`, by path."""
        roles = np.where(self.labels == UNLABELED, "unlabeled", "labeled")
        roles[self.training :] = "test"
        return roles


def scan_folder(folder: Path, labels_file: Path | None = None) -> FolderIndex:
    """Find the pictures of `labeled/<class>/**`, `unlabeled/**` and `test/<class>/**`, or of one folder with `labels.csv`.

    Args:
        folder: where the pictures lie. Without `labeled/`, everything outside `test/` is a training picture.
        labels_file: `path,label`; by default the folder's own `labels.csv`, where there is one. A label given there wins
            over the directory; an empty one changes nothing, and a picture it does not name stays what it was.
    """
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir():
        raise RequestError(f"there is no folder {folder}.\nName a folder with labeled/<class>/ and unlabeled/ in it.")
    if labels_file is None and (folder / LABELS_FILE).is_file():
        labels_file = folder / LABELS_FILE
    walk = _Walk(folder)
    classes = _walk_parts(walk, labels_file is not None)
    places = {}
    for path in list(walk.files):
        part, *below = path.split("/", 2)
        if part == "test" or (part == "labeled" and classes is not None):
            if len(below) == 2:
                places[path] = (part, below[0])
            elif below:
                walk.skip(path, "lies outside any class directory")
                del walk.files[path]
    labels = {path: name for path, (part, name) in places.items() if part == "labeled"}
    test = {path: name for path, (part, name) in places.items() if part == "test"}
    if labels_file is not None:
        labels |= _read_labels(labels_file, walk, test)
    _check_classes(folder, classes or [], labels, test)
    return _index(walk, places, labels, test)


def find_pictures(folder: Path) -> list[Path]:
    """All picture files below a folder, sorted; what is hidden, or cannot be looked into, is passed over."""
    walk = _Walk(folder)
    walk.walk("")
    return [folder / path for path in sorted(walk.files)]


def _walk_parts(walk: _Walk, has_labels_file: bool) -> list[str] | None:
    """Find all pictures; the class directories in labeled/, or None where there is no labeled/."""
    folder, parts = walk.root, _directories(walk.root)
    if "labeled" in parts:
        for name in parts:
            if name in ("labeled", "unlabeled", "test"):
                walk.walk(name)
            else:
                walk.skip(name, "neither labeled/, unlabeled/ nor test/")
        return _directories(folder / "labeled")
    if not has_labels_file:
        raise DataError(
            f"{folder} has neither labeled/ nor {LABELS_FILE} (directories found: {join_names(parts) or 'none'}).\n"
            f"Put labeled pictures into labeled/<class>/ and the others into unlabeled/, or write {LABELS_FILE}: path,label"
        )
    walk.walk("")
    return None


def _index(walk: _Walk, places: dict[str, tuple[str, str]], labels: dict[str, str], test: dict[str, str]) -> FolderIndex:
    order = {"labeled": 0, "unlabeled": 1, "test": 2}

    def position(path: str) -> tuple[int, str, str]:
        part, name = places.get(path, ("unlabeled", ""))
        return order[part], name, path

    paths = sorted(walk.files, key=position)
    names = sorted({*labels.values()})
    number = {name: label for label, name in enumerate(names)}
    known = labels | test
    return FolderIndex(
        folder=walk.root,
        class_names=tuple(names),
        paths=tuple(paths),
        labels=np.array([number[known[path]] if path in known else UNLABELED for path in paths], np.int64),
        training=len(paths) - len(test),
        stats=np.array(walk.stats, np.int64).reshape(-1, 3)[[walk.files[path] for path in paths]],
        skipped=tuple(sorted(walk.skipped)),
        ignored=dict(walk.ignored),
    )


def _check_classes(folder: Path, wanted: list[str], labels: dict[str, str], test: dict[str, str]) -> None:
    found = {*labels.values()}
    if empty := {*wanted} - found:
        raise DataError(
            f"{folder / 'labeled'} has no pictures of {join_names(empty)}.\nAdd one of each class, or remove the directory."
        )
    if not found:
        raise DataError(
            f"{folder} has no labeled pictures.\nPut a few of each class into labeled/<class>/, or name them in {LABELS_FILE}."
        )
    if len(found) == 1:
        raise DataError(f"{folder} has one class only: {join_names(found)}.\nLabel pictures of at least one other class.")
    if strange := {*test.values()} - found:
        raise DataError(
            f"{folder / 'test'} has classes without labeled pictures: {join_names(strange)}.\n"
            f"Labeled classes: {join_names(found, 20)}"
        )


def _directories(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.\nMake it readable, or copy the pictures.") from error


class _Walk:
    """All picture files below a folder. Links to directories are followed, each target once and never in a circle."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, int] = {}
        """Place of each picture in `stats`."""
        self.stats = array("q")
        self.skipped: list[SkippedFile] = []
        self.ignored: Counter[str] = Counter()
        self._linked: set[tuple[int, int]] = set()

    def walk(self, top: str) -> None:
        waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [(top, (_identity(os.stat(self.root)),))]
        while waiting:
            relative, above = waiting.pop()
            try:
                above = (*above, _identity(os.stat(self.root / relative)))
                with os.scandir(self.root / relative) as found:  # files are let go at once: an entry keeps its large status
                    directories = [entry for entry in found if entry.name[0] != "." and self._look(entry, relative)]
            except OSError as error:
                self.skip(relative or ".", str(error.strerror).lower())
                continue
            for entry in sorted(directories, key=lambda entry: entry.name):
                path = posixpath.join(relative, entry.name)
                if not entry.is_symlink() or self._may_follow(path, _identity(entry.stat()), above):
                    waiting.append((path, above))

    def skip(self, path: str, reason: str) -> None:
        self.skipped.append(SkippedFile(path.encode("utf-8", "backslashreplace").decode(), reason))

    def _may_follow(self, path: str, target: tuple[int, int], above: Iterable[tuple[int, int]]) -> bool:
        if target in above or target in self._linked:
            self.skip(path, "a link in a circle" if target in above else "a second link to the same directory")
            return False
        self._linked.add(target)
        return True

    def _look(self, entry: os.DirEntry[str], relative: str) -> bool:
        """Whether `entry` is a directory; a picture is noted down."""
        path = f"{relative}/{entry.name}" if relative else entry.name
        try:
            if entry.is_dir():
                return True
            _, dot, ending = entry.name.rpartition(".")
            if dot + ending.lower() not in EXTENSIONS:
                self.ignored[dot + ending.lower() if dot else ""] += 1
                return False
            status = entry.stat()
        except OSError as error:
            self.skip(path, "a link that leads nowhere" if entry.is_symlink() else str(error.strerror).lower())
            return False
        if not stat.S_ISREG(status.st_mode):
            self.skip(path, "not a regular file")
        elif not path.isascii() and path.encode("utf-8", "replace").decode() != path:
            self.skip(path, "a name that is not UTF-8")
        else:
            self.files[path] = len(self.files)
            self.stats.extend((status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def join_names(names: Iterable[str], most: int = 5) -> str:
    """Names for a message: sorted, on one line, not too many."""
    shown = [name if name.isprintable() else ascii(name)[1:-1] for name in sorted(names)]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def _read_labels(file: Path, walk: _Walk, test: dict[str, str]) -> dict[str, str]:
    """Labels by path from a CSV file with the columns `path` and `label`; other columns and empty labels are passed over."""
    composed = {unicodedata.normalize("NFC", path): path for path in walk.files}
    labels: dict[str, str] = {}
    missing = []
    for path, label in label_lines(file):
        place = path if path in walk.files else composed.get(_normal(path, walk.root))
        if place is None:
            missing.append(path)
        elif labels.setdefault(place, label) != label:
            raise DataError(f"{file} labels {path} twice: {labels[place]!r} and {label!r}.\nKeep one of the lines.")
        elif label and label != test.get(place, label):
            raise DataError(f"{file} labels {path} as {label!r}, a test picture of {test[place]!r}.\nMove the picture instead.")
    if missing:
        raise DataError(
            f"{len(missing)} pictures of {file} are not in {walk.root}: {join_names(missing, 3)}.\n"
            "Paths are relative to the folder; remove the lines of pictures that are gone."
        )
    return {path: label for path, label in labels.items() if label and path not in test}


def label_lines(file: Path) -> list[tuple[str, str]]:
    """(path, label) by line of a CSV file with these columns, labels possibly empty."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        delimiter = ";" if ";" in text.partition("\n")[0] else ","
        header, *rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row] or [[]]
    except FileNotFoundError as error:
        raise RequestError(f"there is no labels file {file}.\nIt has the header path,label and a line per picture.") from error
    except (OSError, UnicodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {str(error).splitlines()[0]}.\nSave it as CSV in UTF-8.") from error
    columns = [name.strip().lower() for name in header]
    if "path" not in columns or "label" not in columns:
        raise DataError(
            f"{file} has no header path,label (first line: {join_names(columns) or 'empty'}).\nMake it the first line."
        )
    path, label = columns.index("path"), columns.index("label")
    padded = [[*row, *[""] * len(columns)] for row in rows]
    return [(row[path].strip(), row[label].strip()) for row in padded if row[path].strip()]


def _normal(path: str, folder: Path) -> str:
    """A path the way other programs write it: with backslashes, `./`, absolute, with decomposed accents."""
    path = posixpath.normpath(path.replace("\\", "/"))
    return unicodedata.normalize("NFC", posixpath.relpath(path, folder) if path.startswith("/") else path)


@dataclass(frozen=True)
class FolderData:
    """A folder's pictures, ready for training.

    Attributes:
        train: labeled and unlabeled pictures (label -1), in the order of the index; broken ones left out.
        test: the test pictures, where there are any.
        labeled_rows: rows of `train`, ordered by class, then path.
        unlabeled_rows: rows of `train`, ordered by path.
        train_paths: relative path by row of `train`.
        test_paths: relative path by row of `test`.
        broken: pictures that cannot be read.
        decoded: the pixels of all, for `preflight`.
    """

    train: ImageSet
    test: ImageSet | None
    labeled_rows: Tensor
    unlabeled_rows: Tensor
    train_paths: tuple[str, ...]
    test_paths: tuple[str, ...]
    broken: tuple[SkippedFile, ...]
    decoded: Decoded

    @property
    def image_size(self) -> int:
        """Side of the images."""
        return int(self.decoded.pixels.shape[1])

    @property
    def channels(self) -> int:
        """1 where every readable picture is gray, else 3."""
        return int(self.decoded.pixels.shape[3])


def read_folder(index: FolderIndex, image_size: int | None, cache_dir: Path, progress: Progress | None = None) -> Decoded:
    """The pixels of all readable pictures, without torch; see `cached_pixels`."""
    return cached_pixels(Listing(index.folder, index.paths, index.stats), image_size, cache_dir, progress)


def load_folder(index: FolderIndex, image_size: int | None, cache_dir: Path, progress: Progress | None = None) -> FolderData:
    """The image sets of a scanned folder.

    Args:
        index: what `scan_folder` found.
        image_size: side of the images; None for the median shorter side of the pictures, within 8..512.
        cache_dir: where decoded pixels are kept, usually `<data_dir>/folders`.
        progress: called with the number of pictures done and of pictures in all, while there is something to decode.
    """
    import torch

    from crmatch.data.images import ImageSet
    from crmatch.data.splits import given_split

    decoded = read_folder(index, image_size, cache_dir, progress)
    labels = index.labels[decoded.rows]
    paths = tuple(index.paths[row] for row in decoded.rows)
    training = int(np.searchsorted(decoded.rows, index.training))
    counts = np.bincount(labels[:training][labels[:training] >= 0], minlength=len(index.class_names))
    if lost := [name for name, count in zip(index.class_names, counts, strict=True) if not count]:
        raise DataError(
            f"none of the labeled pictures of {join_names(lost)} can be read.\n"
            f"Replace them: {join_names([index.paths[row] for row in decoded.broken if index.labels[row] >= 0], 3)}"
        )
    images = torch.from_numpy(decoded.pixels).permute(0, 3, 1, 2)
    known = torch.from_numpy(labels)
    split = given_split(known[:training], "remaining")
    return FolderData(
        train=ImageSet(images[:training], known[:training], index.class_names),
        test=ImageSet(images[training:], known[training:], index.class_names) if training < len(paths) else None,
        labeled_rows=split.labeled,
        unlabeled_rows=split.unlabeled,
        train_paths=paths[:training],
        test_paths=paths[training:],
        broken=tuple(SkippedFile(index.paths[row], reason) for row, reason in sorted(decoded.broken.items())),
        decoded=decoded,
    )
