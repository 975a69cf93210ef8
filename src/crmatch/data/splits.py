"""Which training images are labeled (splits), and which images are in the batch of a step (sampling).

Each setting has five fixed splits, the same for every method and seed. Batches are a pure function of (seed, stream, step):
a stream is a concatenation of seeded permutations of 0..size-1, and step t takes positions t*B to (t+1)*B - 1 of it. So all
images are used equally often, a batch may span two permutations, and any step can be computed without the ones before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from crmatch.atomic_files import read_json, write_json
from crmatch.data.images import LEFT_OUT, UNLABELED, DataSet, ImageSet
from crmatch.errors import DataError, RequestError
from crmatch.randomness import generator

UnlabeledRule = Literal["remaining", "all"]
SplitRule = Literal["balanced", "proportional", "folds"]


class Split(NamedTuple):
    """Rows of the training set: the labeled ones, ordered by class and row, and the ones used as unlabeled images."""

    labeled: Tensor
    unlabeled: Tensor


def make_split(data: DataSet, labels_per_class: int, number: int, rule: SplitRule, unlabeled: UnlabeledRule) -> Split:
    """Make split `number` (from 1) of a setting.

    The rule `balanced` takes exactly `labels_per_class` images of each class, `proportional` as many on average, following
    the training distribution (Google's protocol for SVHN), `folds` the published fold of that number, counted from 0. The
    labeled images are also used as unlabeled ones (`all`) or not (`remaining`, as in the paper).
    """
    train = data.train
    if rule == "folds":
        labeled = _published_fold(data, labels_per_class, number)
    else:
        available = torch.bincount(train.labels[train.labels >= 0], minlength=train.classes).tolist()
        counts = [labels_per_class] * train.classes
        if rule == "proportional":
            counts = proportional_counts(available, labels_per_class * train.classes)
        labeled = _draw_labeled(train, counts, available, labels_per_class, number)
    is_unlabeled = torch.ones(len(train), dtype=torch.bool)
    if unlabeled == "remaining":
        is_unlabeled[labeled] = False
    if not is_unlabeled.any():
        raise RequestError(
            f"{labels_per_class} labels per class leave no unlabeled image.\n"
            "Ask for fewer, or use the labeled images as unlabeled ones too: --set data.unlabeled=all"
        )
    return Split(labeled, is_unlabeled.nonzero().squeeze(1))


def given_split(labels: Tensor, unlabeled: UnlabeledRule) -> Split:
    """The split given by the labels themselves: `labels` (N,) are -1 for unlabeled images and -2 for images to leave out."""
    order = labels.argsort(stable=True)[int((labels == LEFT_OUT).sum()) :]
    rest, labeled = order.tensor_split([int((labels == UNLABELED).sum())])
    return Split(labeled, torch.cat([labeled, rest]) if unlabeled == "all" else rest)


def balanced(labeled: Tensor, labels: Tensor) -> Tensor:
    """The labeled rows, with those of smaller classes repeated: every class has as many as the largest one."""
    parts = [labeled[labels[labeled] == label] for label in sorted({*labels[labeled].tolist()})]
    most = max(len(part) for part in parts)
    return torch.cat([part.repeat(-(-most // len(part)))[:most] for part in parts])


def proportional_counts(available: Sequence[int], total: int) -> list[int]:
    """Labels per class that follow the training distribution, computed as in Google's create_split.

    Repeatedly gives one more label to the class that is furthest behind: argmax_c of n_c / max n - k_c / max(max k, 1).
    """
    share = [count / max(available) for count in available]
    taken = [0] * len(available)
    for _ in range(total):
        most = max(*taken, 1)
        taken[max(range(len(taken)), key=lambda label: share[label] - taken[label] / most)] += 1
    return taken


def describe_split(split: Split, train: ImageSet, setting: str, number: int, rule: str) -> dict[str, Any]:
    """The content of a split's JSON file: the labeled rows, the rule and number, and the fingerprint of the data."""
    left_out = (train.labels == LEFT_OUT).nonzero().flatten().tolist()
    return {
        "setting": setting,
        "split": number,
        "rule": rule,
        "data_fingerprint": train.fingerprint,
        "classes": list(train.class_names),
        "labels_of_class": torch.bincount(train.labels[split.labeled], minlength=train.classes).tolist(),
        "labeled": split.labeled.tolist(),
        "unlabeled_images": len(split.unlabeled),
        **({"left_out": left_out} if left_out else {}),
    }


def keep_split(path: Path, description: dict[str, Any]) -> None:
    """Write a split's file if there is none; raise a `DataError` if there is one with another content."""
    if not path.exists():
        write_json(path, description)
        return
    kept = read_json(path)
    if kept.get("data_fingerprint") != description["data_fingerprint"]:
        raise DataError(
            f"{path} was made for other data (fingerprint {kept.get('data_fingerprint')}, "
            f"now {description['data_fingerprint']}).\nRestore the old data, or choose another directory."
        )
    if kept != description:
        raise DataError(f"{path} contains another split, and splits are never overwritten.\nChoose another directory.")


def batch_positions(size: int, batch_size: int, seed: int, stream: str, step: int) -> Tensor:
    """Positions, in a pool of `size` images, of the images in the batch of `step`: int64 (batch_size,)."""
    first, last = step * batch_size, (step + 1) * batch_size
    parts = []
    for epoch in range(first // size, (last - 1) // size + 1):
        order = _permutation(size, seed, stream, epoch)
        parts.append(order[max(first - epoch * size, 0) : min(last - epoch * size, size)])
    return torch.cat(parts)


@lru_cache(maxsize=16)
def _permutation(size: int, seed: int, stream: str, epoch: int) -> Tensor:
    return torch.randperm(size, generator=generator(seed, stream, epoch))


def _draw_labeled(train: ImageSet, counts: list[int], available: list[int], labels_per_class: int, number: int) -> Tensor:
    chosen = []
    for label, (name, count) in enumerate(zip(train.class_names, counts, strict=True)):
        if available[label] < count:
            raise RequestError(
                f"{labels_per_class} labels per class were requested, but class {name!r} has {available[label]} images.\n"
                f"Use at most {min(available)}."
            )
        rows = (train.labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(rows), generator=generator(number, "split", label))
        chosen.append(rows[order[:count]].sort().values)
    return torch.cat(chosen)


def _published_fold(data: DataSet, labels_per_class: int, number: int) -> Tensor:
    if data.folds is None or number >= len(data.folds):
        found = "none" if data.folds is None else f"{len(data.folds)}, of which 1 to {len(data.folds) - 1} are used"
        raise RequestError(f"fold {number} was requested, but the data set's published folds are: {found}.")
    rows = data.folds[number]
    if len(rows) != labels_per_class * data.train.classes:
        fits = len(rows) // data.train.classes
        raise RequestError(
            f"the published folds have {len(rows)} labels, not {labels_per_class} per class.\n"
            f"Use @{fits}, or --set data.split_rule=balanced"
        )
    return rows[(data.train.labels[rows] * len(data.train) + rows).argsort()]  # ordered by class, then by row
