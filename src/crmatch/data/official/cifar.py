"""CIFAR-10 and CIFAR-100 from the official binary archives; the Python ones are pickles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from crmatch.data.official.members import refused, tar_members
from crmatch.data.packed import Array, Rows, chunks

if TYPE_CHECKING:
    from crmatch.data.official.catalog import SourceSet

SIDE = 32
PIXELS = 3 * SIDE * SIDE
TEXT = 1 << 16


class _Layout(NamedTuple):
    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    label_bytes: int
    """Bytes before the pixels of a record; the last of them is the label."""


CIFAR10 = _Layout(
    "cifar-10-batches-bin", tuple(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin", "batches.meta.txt", 1
)
CIFAR100 = _Layout("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt", 2)


def read_cifar(paths: Sequence[Path], entry: SourceSet) -> dict[str, Array | Rows]:
    """The arrays of `cifar-10-binary.tar.gz` or `cifar-100-binary.tar.gz`.

    A record is the label (CIFAR-100: the coarse label, then the fine one, which is kept) and the red, green and blue
    plane of one image, each row by row.
    """
    (path,) = paths
    layout = CIFAR100 if entry.reader == "cifar100" else CIFAR10
    width = layout.label_bytes + PIXELS
    counts = dict.fromkeys(layout.train, entry.counts["train"] // len(layout.train)) | {layout.test: entry.counts["test"]}
    sizes = {f"{layout.folder}/{name}": count * width for name, count in counts.items()}
    parts: dict[str, Array] = {}
    names: list[str] = []
    for member in tar_members(path, sizes | {f"{layout.folder}/{layout.names}": TEXT}):
        if member.name not in sizes:
            names = class_names(path, member.lines(), entry.classes)
            continue
        if member.size != sizes[member.name]:
            raise refused(path, f"{member.name} has {member.size:,} bytes, not {sizes[member.name]:,}")
        records = np.frombuffer(member.read(), np.uint8).reshape(-1, width)
        check_labels(path, records[:, layout.label_bytes - 1], 0, entry.classes - 1)
        parts[member.name.rpartition("/")[2]] = records
    return {
        "train_images": _images([parts[name] for name in layout.train], layout),
        "train_labels": _labels([parts[name] for name in layout.train], layout),
        "test_images": _images([parts[layout.test]], layout),
        "test_labels": _labels([parts[layout.test]], layout),
        "class_names": np.array(names),
    }


def class_names(path: Path, lines: Sequence[str], classes: int) -> list[str]:
    """Names of classes from the lines of a file, checked."""
    if len(lines) != classes or len(set(lines)) != classes:
        raise refused(path, f"it names {len(set(lines))} classes, not {classes}")
    return list(lines)


def check_labels(path: Path, labels: Array, lowest: int, highest: int) -> None:
    """Refuse a file with a label outside lowest..highest."""
    if labels.size and not lowest <= labels.min() <= labels.max() <= highest:
        raise refused(path, f"it has labels from {labels.min()} to {labels.max()}, not {lowest} to {highest}")


def _images(records: Sequence[Array], layout: _Layout) -> Rows:
    count = sum(map(len, records))
    planes = (part[:, layout.label_bytes :].reshape(-1, 3, SIDE, SIDE) for part in records)
    return Rows((count, SIDE, SIDE, 3), (piece.transpose(0, 2, 3, 1) for part in planes for piece in chunks(part)))


def _labels(records: Sequence[Array], layout: _Layout) -> Array:
    return np.concatenate([part[:, layout.label_bytes - 1] for part in records]).astype(np.int64)
