"""Folders of pictures as image sets: scan, decode (or take decoded pixels from the cache), build tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from crmatch.data.folder.cache import Decoded, decode_folder
from crmatch.data.folder.scan import join_names, scan_folder
from crmatch.data.folder.workers import Progress
from crmatch.errors import DataError

if TYPE_CHECKING:
    from crmatch.data.images import ImageSet


class FolderData(NamedTuple):
    """The readable pictures of a folder, in the order of its index."""

    train: ImageSet  # labeled, unlabeled (label -1) and left out pictures (label -2)
    test: ImageSet | None
    train_paths: tuple[str, ...]  # relative path by row of `train`
    test_paths: tuple[str, ...]
    decoded: Decoded
    by_directory: dict[str, str]  # path -> class of the pictures in labeled/, whatever labels.csv says


def load_folder(
    folder: Path,
    image_size: int | None = None,
    data_dir: Path | None = None,
    labels_file: Path | None = None,
    progress: Progress | None = None,
    trainable: bool = True,
) -> FolderData:
    """Scan a folder (see `scan_folder`) and load its pictures.

    The image size is by default the median shorter side of the pictures, within 8..512. `progress` is called while pictures
    are decoded. Decoded pixels are cached in `<data_dir>/folders`. `trainable`: as for `scan_folder`.
    """
    import torch

    from crmatch.data.images import ImageSet

    index = scan_folder(folder, labels_file, trainable)
    decoded = decode_folder(index, image_size, data_dir, progress)
    labels = torch.from_numpy(index.labels[decoded.rows])
    images = torch.from_numpy(decoded.pixels).permute(0, 3, 1, 2)
    paths = tuple(index.paths[row] for row in decoded.rows)
    training = int(np.searchsorted(decoded.rows, index.training))
    readable = {*labels[:training].tolist()}
    lost = [name for label, name in enumerate(index.class_names) if label not in readable]
    if lost and trainable:
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
        by_directory=index.by_directory,
    )
