"""Splits: which images of the training set are labeled. Five fixed splits per setting, independent of the run's seed."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from crmatch.data.images import ImageSet
from crmatch.errors import RequestError
from crmatch.randomness import generator

UnlabeledRule = Literal["remaining", "all"]


class Split(NamedTuple):
    """Rows of the training set by role; labeled rows are ordered by class, then by row."""

    labeled: Tensor
    unlabeled: Tensor

    def describe(self, train: ImageSet) -> dict[str, Any]:
        """What `split.json` holds: the index list, its rule and the data it belongs to."""
        return {
            "rule": "balanced",
            "data_fingerprint": train.fingerprint,
            "classes": list(train.class_names),
            "labeled": self.labeled.tolist(),
            "unlabeled_images": len(self.unlabeled),
        }


def balanced_split(train: ImageSet, labels_per_class: int, number: int, unlabeled: UnlabeledRule) -> Split:
    """Split `number` of a setting: exactly `labels_per_class` images of each class are labeled.

    Args:
        train: the training set, labels known or -1.
        labels_per_class: how many images of each class keep their label.
        number: which of the fixed splits, from 1; the same for every method and seed.
        unlabeled: whether the labeled images are among the unlabeled ones (`all`) or not (`remaining`, the paper's text).
    """
    chosen = []
    for label, name in enumerate(train.class_names):
        rows = (train.labels == label).nonzero().squeeze(1)
        if len(rows) < labels_per_class:
            raise RequestError(
                f"{labels_per_class} labels per class were asked for, but class {name!r} has {len(rows)} images.\n"
                f"Use at most {int(torch.bincount(train.labels[train.labels >= 0], minlength=train.classes).min())}."
            )
        order = torch.randperm(len(rows), generator=generator(number, "split", label))
        chosen.append(rows[order[:labels_per_class]].sort().values)
    labeled = torch.cat(chosen)
    rest = torch.ones(len(train), dtype=torch.bool)
    if unlabeled == "remaining":
        rest[labeled] = False
    if not rest.any():
        raise RequestError(
            f"{labels_per_class} labels per class leave no unlabeled image.\n"
            "Ask for fewer, or use the labeled images as unlabeled ones too: --set data.unlabeled=all"
        )
    return Split(labeled, rest.nonzero().squeeze(1))
