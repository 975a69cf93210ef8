from __future__ import annotations

import pytest
import torch

from crmatch.data.digits import read_digits
from crmatch.data.images import ImageSet
from crmatch.data.splits import balanced_split
from crmatch.errors import RequestError


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return read_digits().train


@pytest.mark.parametrize("number", range(1, 6))
def test_each_class_has_exactly_n_labels(digits: ImageSet, number: int) -> None:
    split = balanced_split(digits, 4, number, "remaining")
    assert torch.bincount(digits.labels[split.labeled]).tolist() == [4] * 10


def test_the_five_splits_differ_and_are_always_the_same(digits: ImageSet) -> None:
    splits = [balanced_split(digits, 4, number, "remaining").labeled.tolist() for number in range(1, 6)]
    assert len({tuple(split) for split in splits}) == 5
    assert splits == [balanced_split(digits, 4, number, "all").labeled.tolist() for number in range(1, 6)]
    assert splits[0][:4] == [57, 191, 415, 1192]  # split 1, digit 0: a fixed split is part of every published number


def test_remaining_leaves_the_labeled_images_out_and_all_does_not(digits: ImageSet) -> None:
    remaining, everything = (balanced_split(digits, 4, 1, rule) for rule in ("remaining", "all"))
    assert not set(remaining.labeled.tolist()) & set(remaining.unlabeled.tolist())
    assert len(remaining.unlabeled) == len(digits) - 40
    assert everything.unlabeled.tolist() == list(range(len(digits)))


def test_labeled_rows_are_ordered_by_class_then_row(digits: ImageSet) -> None:
    rows = balanced_split(digits, 4, 2, "remaining").labeled
    keys = list(zip(digits.labels[rows].tolist(), rows.tolist(), strict=True))
    assert keys == sorted(keys)


def test_images_without_a_known_label_are_never_labeled() -> None:
    labels = torch.tensor([0, 1, 0, 1, -1, -1, -1])
    train = ImageSet(torch.zeros(7, 1, 8, 8, dtype=torch.uint8), labels, ("a", "b"))
    split = balanced_split(train, 1, 1, "remaining")
    assert (labels[split.labeled] >= 0).all()
    assert set(split.unlabeled.tolist()) >= {4, 5, 6}


def test_more_labels_than_images_is_refused_with_the_largest_possible_number(digits: ImageSet) -> None:
    with pytest.raises(RequestError, match=r"400 labels per class .* class '0' has 1\d\d images\.\nUse at most 1\d\d"):
        balanced_split(digits, 400, 1, "remaining")


def test_no_unlabeled_image_left_is_refused() -> None:
    train = ImageSet(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
    with pytest.raises(RequestError, match="leave no unlabeled image"):
        balanced_split(train, 1, 1, "remaining")
    assert len(balanced_split(train, 1, 1, "all").unlabeled) == 2
