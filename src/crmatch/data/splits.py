"""Index batches as a pure function of (seed, stream, step).

A stream is a concatenation of seeded permutations of 0..size-1; step t takes positions t*B .. (t+1)*B - 1 of it. So every
image is used equally often, a batch may span two permutations, and any step can be asked for without the ones before.

Splits: which images of the training set are labeled. Five fixed splits per setting, the same for every method and seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from crmatch.atomic_files import read_json, write_json
from crmatch.data.images import UNLABELED, DataSet, ImageSet
from crmatch.errors import DataError, RequestError
from crmatch.randomness import generator


def batch_positions(size: int, batch_size: int, seed: int, stream: str, step: int) -> Tensor:
    """Positions in a pool of `size` images that make up the batch of `step`: int64 (batch_size,)."""
    first, last = step * batch_size, (step + 1) * batch_size
    parts = []
    for epoch in range(first // size, (last - 1) // size + 1):
        order = _permutation(size, seed, stream, epoch)
        parts.append(order[max(first - epoch * size, 0) : min(last - epoch * size, size)])
    return torch.cat(parts)


@lru_cache(maxsize=16)
def _permutation(size: int, seed: int, stream: str, epoch: int) -> Tensor:
    return torch.randperm(size, generator=generator(seed, stream, epoch))


UnlabeledRule = Literal["remaining", "all"]
SplitRule = Literal["balanced", "proportional", "folds"]


class Split(NamedTuple):
    """Rows of the training set by role; labeled rows are ordered by class, then by row."""

    labeled: Tensor
    unlabeled: Tensor


def make_split(data: DataSet, labels_per_class: int, number: int, rule: SplitRule, unlabeled: UnlabeledRule) -> Split:
    """Split `number` (from 1) of a setting.

    Args:
        data: the data set; training labels known or -1.
        labels_per_class: how many images of each class keep their label, on average.
        number: which of the fixed splits.
        rule: `balanced` takes exactly `labels_per_class` of each class, `proportional` follows the training distribution
            (Google's protocol for SVHN), `folds` takes the published fold of that number, counted from 0 as Google does.
        unlabeled: whether the labeled images are among the unlabeled ones (`all`) or not (`remaining`, the paper's text).
    """
    train = data.train
    if rule == "folds":
        labeled = _published_fold(data, labels_per_class, number)
    else:
        available = torch.bincount(train.labels[train.labels >= 0], minlength=train.classes).tolist()
        counts = [labels_per_class] * train.classes
        if rule == "proportional":
            counts = proportional_counts(available, labels_per_class * train.classes)
        labeled = _drawn(train, counts, available, labels_per_class, number)
    rest = torch.ones(len(train), dtype=torch.bool)
    if unlabeled == "remaining":
        rest[labeled] = False
    if not rest.any():
        raise RequestError(
            f"{labels_per_class} labels per class leave no unlabeled image.\n"
            "Ask for fewer, or use the labeled images as unlabeled ones too: --set data.unlabeled=all"
        )
    return Split(labeled, rest.nonzero().squeeze(1))


def given_split(labels: Tensor, unlabeled: UnlabeledRule) -> Split:
    """The split of images that are labeled or not as they come: `labels` (N,) are -1 where unlabeled."""
    order = labels.argsort(stable=True)
    rest, labeled = order.tensor_split([int((labels == UNLABELED).sum())])
    return Split(labeled, torch.cat([labeled, rest]) if unlabeled == "all" else rest)


def proportional_counts(available: Sequence[int], total: int) -> list[int]:
    """How many labels each class gets so that counts follow the training distribution, as Google's create_split does.

    Again and again the class that lags furthest behind gets one more: argmax_c of n_c / max n - k_c / max(max k, 1).
    """
    share = [count / max(available) for count in available]
    taken = [0] * len(available)
    for _ in range(total):
        most = max(*taken, 1)
        taken[max(range(len(taken)), key=lambda label: share[label] - taken[label] / most)] += 1
    return taken


def describe_split(split: Split, train: ImageSet, setting: str, number: int, rule: str) -> dict[str, Any]:
    """What a split's JSON file holds: the index list, its rule and seed, and the data it belongs to."""
    return {
        "setting": setting,
        "split": number,
        "rule": rule,
        "data_fingerprint": train.fingerprint,
        "classes": list(train.class_names),
        "labels_of_class": torch.bincount(train.labels[split.labeled], minlength=train.classes).tolist(),
        "labeled": split.labeled.tolist(),
        "unlabeled_images": len(split.unlabeled),
    }


def keep_split(path: Path, description: dict[str, Any]) -> None:
    """Write a split's file once; the same split again is fine, another one is refused and nothing is overwritten."""
    if not path.exists():
        write_json(path, description)
        return
    there = read_json(path)
    if there.get("data_fingerprint") != description["data_fingerprint"]:
        raise DataError(
            f"{path} was made for other data (fingerprint {there.get('data_fingerprint')}, "
            f"now {description['data_fingerprint']}).\nBring the old data back, or choose another directory."
        )
    if there != description:
        raise DataError(f"{path} holds another split, and splits are never overwritten.\nChoose another directory.")


def _drawn(train: ImageSet, counts: list[int], available: list[int], labels_per_class: int, number: int) -> Tensor:
    chosen = []
    for label, (name, count) in enumerate(zip(train.class_names, counts, strict=True)):
        if available[label] < count:
            raise RequestError(
                f"{labels_per_class} labels per class were asked for, but class {name!r} has {available[label]} images.\n"
                f"Use at most {min(available)}."
            )
        rows = (train.labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(rows), generator=generator(number, "split", label))
        chosen.append(rows[order[:count]].sort().values)
    return torch.cat(chosen)


def _published_fold(data: DataSet, labels_per_class: int, number: int) -> Tensor:
    if data.folds is None or number >= len(data.folds):
        found = "none" if data.folds is None else f"{len(data.folds)}, of which 1 to {len(data.folds) - 1} are used"
        raise RequestError(f"fold {number} was asked for, but the data set's published folds are: {found}.")
    rows = data.folds[number]
    if len(rows) != labels_per_class * data.train.classes:
        fits = len(rows) // data.train.classes
        raise RequestError(
            f"the published folds have {len(rows)} labels, not {labels_per_class} per class.\n"
            f"Use @{fits}, or --set data.split_rule=balanced"
        )
    labels = data.train.labels[rows]
    return rows[(labels * len(data.train) + rows).argsort()]
