"""Readers of the official files: they return the arrays of a packed set.

`fetch` verifies size, md5 and sha256 of every official file before a reader opens it. The content is therefore known to the
last byte, and the standard parsers (`tarfile`, `scipy.io.loadmat`) are safe to use. Nothing is unpacked to disk.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from crmatch.data.official.catalog import SourceSet
from crmatch.data.packed import Array, Rows

STL10_SIDE = 96
DIGITS_SIDE = 16
DIGITS_TEST_IMAGES = 500


def read_cifar(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """CIFAR-10 or CIFAR-100 from the binary archive (the Python version consists of pickles).

    A record is the label (CIFAR-100: the coarse label, then the fine one, which is used) and the red, green and blue
    planes of an image, row by row.
    """
    if entry.classes == 100:
        train, test, names, label_bytes = ["train.bin"], "test.bin", "fine_label_names.txt", 2
    else:
        train, test, names, label_bytes = [f"data_batch_{k}.bin" for k in range(1, 6)], "test_batch.bin", "batches.meta.txt", 1
    members = _read_tar(paths[0], {*train, test, names})
    arrays: dict[str, Array | Rows] = {}
    for part, files in (("train", train), ("test", [test])):
        content = b"".join(members[file] for file in files)
        records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + 3 * 32 * 32)
        arrays[f"{part}_images"] = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"{part}_labels"] = records[:, label_bytes - 1].astype(np.int64)
    return arrays | {"class_names": np.array(_lines(members[names]))}


def read_svhn(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """SVHN from the MATLAB files for training, testing and, if there is a third path, more training (`extra_32x32.mat`).

    X is uint8 (32, 32, 3, N): row, column, channel, image. y is 1..9 for these digits and 10 for 0.
    """
    from scipy.io import loadmat

    def images(files: Sequence[Path]) -> Iterator[Array]:
        for file in files:  # loaded while the set is written: one file at a time is in memory
            yield loadmat(file, variable_names=["X"])["X"].transpose(3, 0, 1, 2)

    train, test, *extra = paths
    arrays: dict[str, Array | Rows] = {}
    for part, files in (("train", [train, *extra]), ("test", [test])):
        labels = np.concatenate([loadmat(file, variable_names=["y"])["y"].ravel() for file in files]).astype(np.int64) % 10
        arrays[f"{part}_images"] = Rows((len(labels), 32, 32, 3), images(files))
        arrays[f"{part}_labels"] = labels
    return arrays | {"class_names": np.array([str(digit) for digit in range(10)])}


def read_stl10(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """STL-10 with its ten published folds.

    An image is its red, green and blue planes, column by column. Labels start at 1. Line k of `fold_indices.txt` lists the
    labeled rows of the training set in fold k. The unlabeled images, nine tenths of the file, are read while they are written.
    """
    (path,) = paths
    members = _read_tar(path, {"train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt", "fold_indices.txt"})
    arrays: dict[str, Array | Rows] = {}
    for part in ("train", "test"):
        arrays[f"{part}_images"] = _stl10_images(members[f"{part}_X.bin"])
        arrays[f"{part}_labels"] = np.frombuffer(members[f"{part}_y.bin"], np.uint8).astype(np.int64) - 1
    return arrays | {
        "unlabeled_images": Rows((entry.counts["unlabeled"], STL10_SIDE, STL10_SIDE, 3), _stl10_unlabeled(path)),
        "folds": np.array([line.split() for line in _lines(members["fold_indices.txt"])], np.int64),
        "class_names": np.array(_lines(members["class_names.txt"])),
    }


def read_digits(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """scikit-learn's 1,797 handwritten digits, enlarged from 8x8 to 16x16 pixels; a fixed seed chooses 500 test images."""
    import torch
    from sklearn.datasets import load_digits

    from crmatch.data.images import resize
    from crmatch.randomness import generator

    gray_levels, labels = load_digits(return_X_y=True)
    pixels = np.rint(gray_levels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    images = resize(torch.from_numpy(pixels), DIGITS_SIDE).permute(0, 2, 3, 1).numpy()
    order = torch.randperm(len(images), generator=generator(0, "digits/test")).numpy()
    arrays: dict[str, Array | Rows] = {}
    for part, rows in (("train", order[DIGITS_TEST_IMAGES:]), ("test", order[:DIGITS_TEST_IMAGES])):
        arrays[f"{part}_images"] = images[np.sort(rows)]
        arrays[f"{part}_labels"] = labels[np.sort(rows)].astype(np.int64)
    return arrays | {"class_names": np.array([str(digit) for digit in range(10)])}


def _read_tar(path: Path, names: set[str]) -> dict[str, bytes]:
    """Contents of the members with these file names, in one pass: a seek in a compressed archive starts from its beginning."""
    with tarfile.open(path) as archive:
        found = ((posixpath.basename(member.name), archive.extractfile(member)) for member in archive)
        return {name: file.read() for name, file in found if file and name in names}


def _lines(content: bytes) -> list[str]:
    return [line.strip() for line in content.decode().splitlines() if line.strip()]


def _stl10_images(content: bytes) -> Array:
    """(image, channel, column, row) -> (image, row, column, channel)."""
    return np.frombuffer(content, np.uint8).reshape(-1, 3, STL10_SIDE, STL10_SIDE).transpose(0, 3, 2, 1)


def _stl10_unlabeled(path: Path) -> Iterator[Array]:
    with tarfile.open(path) as archive:
        for member in archive:
            if posixpath.basename(member.name) == "unlabeled_X.bin" and (file := archive.extractfile(member)):
                while content := file.read(256 * 3 * STL10_SIDE**2):
                    yield _stl10_images(content)
