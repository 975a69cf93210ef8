"""Labels that people add to those of a setting: labels.csv whose paths are the numbers of training images."""

from __future__ import annotations

from pathlib import Path

import torch

from crmatch.data.folder import label_lines, some
from crmatch.data.images import DataSet, ImageSet
from crmatch.data.splits import Split
from crmatch.errors import DataError


def add_labels(data: DataSet, split: Split, file: Path) -> tuple[DataSet, Split]:
    """The data with the labels of `file` (`path,label`; a path is the number of a training image), and its split.

    What the file says wins over the label that the data has; images it names count as labeled from now on.
    """
    train = data.train
    number = {name: label for label, name in enumerate(train.class_names)}
    labels, added = train.labels.clone(), []
    for path, label in label_lines(file):
        if not label:
            continue
        if not (path.isascii() and path.isdigit() and int(path) < len(train)):
            raise DataError(
                f"{file} names {path!r}, which is no training image.\n"
                f"For a data set, path is the number of a training image, 0..{len(train) - 1}."
            )
        if label not in number:
            raise DataError(f"{file} labels {path} as {label!r}.\nThe classes are: {some(number, 20)}")
        labels[int(path)] = number[label]
        added.append(int(path))
    is_labeled = torch.zeros(len(train), dtype=torch.bool)
    is_labeled[split.labeled] = True
    is_labeled[added] = True
    rows = is_labeled.nonzero().squeeze(1)
    was_shared = bool(torch.isin(split.labeled, split.unlabeled).any())
    rest = split.unlabeled if was_shared else split.unlabeled[~is_labeled[split.unlabeled]]
    more = ImageSet(train.images, labels, train.class_names)
    return data._replace(train=more), Split(rows[labels[rows].argsort(stable=True)], rest)
