"""Folders of pictures as image sets: scan, decode (or take decoded pixels from the cache), build tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from crmatch.data.folder.cache import Decoded, cached_pixels
from crmatch.data.folder.scan import FolderIndex, join_names, scan_folder
from crmatch.data.folder.workers import Progress
from crmatch.data.settings import default_data_dir
from crmatch.errors import DataError

if TYPE_CHECKING:
    from crmatch.data.images import ImageSet


class FolderData(NamedTuple):
    """The pictures of a folder, ready for training; unreadable ones are left out.

    Attributes:
        train: labeled and unlabeled pictures (label -1), in the order of the index.
        test: the test pictures; None if there are none.
        train_paths: relative path by row of `train`.
        test_paths: relative path by row of `test`.
        decoded: the pixels of all pictures, and why the unreadable ones cannot be read.
    """

    train: ImageSet
    test: ImageSet | None
    train_paths: tuple[str, ...]
    test_paths: tuple[str, ...]
    decoded: Decoded


def decode_folder(
    index: FolderIndex, image_size: int | None, data_dir: Path | None = None, progress: Progress | None = None
) -> Decoded:
    """The pixels of all readable pictures, without torch; decoded pixels are cached in `<data_dir>/folders`."""
    return cached_pixels(index, image_size, (data_dir or default_data_dir()) / "folders", progress)


def load_folder(
    folder: Path,
    image_size: int | None = None,
    data_dir: Path | None = None,
    labels_file: Path | None = None,
    progress: Progress | None = None,
) -> FolderData:
    """Scan a folder and load its pictures.

    Args:
        folder: see `scan_folder`.
        image_size: side of the images; None for the median shorter side of the pictures, within 8..512.
        data_dir: decoded pixels are cached in its directory `folders`; None for the default one.
        labels_file: see `scan_folder`.
        progress: called with the number of finished and of all pictures while pictures are decoded.
    """
    import torch

    from crmatch.data.images import ImageSet

    index = scan_folder(folder, labels_file)
    decoded = decode_folder(index, image_size, data_dir, progress)
    labels = torch.from_numpy(index.labels[decoded.rows])
    images = torch.from_numpy(decoded.pixels).permute(0, 3, 1, 2)
    paths = tuple(index.paths[row] for row in decoded.rows)
    training = int(np.searchsorted(decoded.rows, index.training))
    readable = {*labels[:training].tolist()}
    if lost := [name for label, name in enumerate(index.class_names) if label not in readable]:
        raise DataError(
            f"none of the labeled pictures of {join_names(lost)} can be read.\n"
            f"Replace them: {join_names([index.paths[row] for row in decoded.broken if index.labels[row] >= 0], 3)}"
        )
    return FolderData(
        train=ImageSet(images[:training], labels[:training], index.class_names),
        test=ImageSet(images[training:], labels[training:], index.class_names) if training < len(paths) else None,
        train_paths=paths[:training],
        test_paths=paths[training:],
        decoded=decoded,
    )
