"""A test set for a folder that has none: a fifth of the labeled pictures, listed in `held-out.csv`. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from crmatch.data.folder.labels_file import change_labels
from crmatch.data.folder.scan import HELD_OUT_FILE, FolderIndex, scan_folder

SHARE = 5
"""One of so many labeled pictures of each class is held out."""
FEWEST, MOST = 20, 500
"""Labels of the smallest class for which this is done: fewer are all needed for training. At most so many are held out."""


def held_out_counts(index: FolderIndex) -> list[int]:
    """How many pictures of each class to hold out; empty if there is a test set, if there was one, or if labels are too few."""
    labels = np.bincount(index.labels[index.roles == "labeled"], minlength=len(index.class_names))
    has_test = index.training < len(index.paths) or (index.folder / HELD_OUT_FILE).exists()
    return [] if has_test or labels.min() < FEWEST else np.minimum(labels // SHARE, MOST).tolist()


def hold_out(folder: Path, labels_file: Path | None = None) -> int:
    """Hold out a part of each class as a test set and store it in the folder; returns the number of pictures, 0 if none."""
    index = scan_folder(folder, labels_file)
    counts, roles = held_out_counts(index), index.roles
    held_out: dict[str, str] = {}
    for label, count in enumerate(counts):
        rows = np.flatnonzero((index.labels == label) & (roles == "labeled"))
        chosen = np.sort(np.random.default_rng([0, label]).permutation(rows)[:count])
        held_out |= {index.paths[row]: index.class_names[label] for row in chosen}
    if counts:
        change_labels(index.folder / HELD_OUT_FILE, index.folder, held_out)
    return sum(counts)
