from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crmatch.data.images import DataSet, ImageSet
from crmatch.data.load import load_data
from crmatch.data.splits import Split, balanced, batch_positions, describe_split, keep_split, make_split, proportional_counts
from crmatch.errors import DataError, RequestError


@pytest.fixture(scope="module")
def digits() -> ImageSet:
    return load_data("digits").train


def balanced_split(train: ImageSet, labels: int, number: int, unlabeled: str) -> Split:
    return make_split(DataSet(train, None), labels, number, "balanced", unlabeled)  # type: ignore[arg-type]


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


SVHN = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]


@pytest.mark.parametrize(
    ("total", "counts_1_to_9_then_0"),
    [
        (40, [7, 6, 4, 4, 4, 3, 3, 3, 3, 3]),
        (250, [47, 36, 29, 25, 24, 20, 19, 17, 16, 17]),
        (1000, [189, 144, 116, 102, 94, 78, 76, 69, 64, 68]),
    ],
)
def test_proportional_splits_of_svhn_have_the_published_counts(total: int, counts_1_to_9_then_0: list[int]) -> None:
    counts = proportional_counts(SVHN, total)
    assert [*counts[1:], counts[0]] == counts_1_to_9_then_0


def test_a_proportional_split_follows_the_training_distribution() -> None:
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    train = ImageSet(torch.zeros(100, 1, 8, 8, dtype=torch.uint8), labels, ("a", "b", "c"))
    split = make_split(DataSet(train, None), 5, 1, "proportional", "remaining")
    assert torch.bincount(labels[split.labeled]).tolist() == proportional_counts([60, 30, 10], 15)


def folded() -> DataSet:
    labels = torch.tensor([0, 1] * 10)
    train = ImageSet(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), labels, ("a", "b"))
    return DataSet(train, None, torch.tensor([[0, 1, 2, 3], [9, 4, 7, 6], [5, 6, 7, 8]]))


def test_published_folds_are_taken_by_their_number_counted_from_0() -> None:
    split = make_split(folded(), 2, 1, "folds", "remaining")
    assert split.labeled.tolist() == [4, 6, 7, 9]
    assert len(split.unlabeled) == 16


@pytest.mark.parametrize(("labels", "number", "message"), [(2, 3, "fold 3 was requested"), (3, 1, r"Use @2, or --set")])
def test_folds_that_do_not_exist_are_refused(labels: int, number: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_split(folded(), labels, number, "folds", "remaining")
    with pytest.raises(RequestError, match="none"):
        make_split(folded()._replace(folds=None), labels, number, "folds", "remaining")


def test_a_split_file_is_written_once_and_never_changed(digits: ImageSet, tmp_path: Path) -> None:
    file = tmp_path / "split1.json"
    first, second = (
        describe_split(balanced_split(digits, 4, number, "remaining"), digits, "digits@4", number, "balanced")
        for number in (1, 2)
    )
    keep_split(file, first)
    before = file.read_bytes()
    keep_split(file, first)
    with pytest.raises(DataError, match="never overwritten"):
        keep_split(file, second)
    with pytest.raises(DataError, match="made for other data"):
        keep_split(file, {**first, "data_fingerprint": "0"})
    assert file.read_bytes() == before


@given(size=st.integers(1, 50), batch=st.integers(1, 70), seed=st.integers(0, 5), steps=st.integers(1, 6))
def test_a_stream_is_a_concatenation_of_permutations(size: int, batch: int, seed: int, steps: int) -> None:
    stream = torch.cat([batch_positions(size, batch, seed, "unlabeled", step) for step in range(steps)])
    assert len(stream) == steps * batch
    for epoch in stream.split(size):
        assert len(set(epoch.tolist())) == len(epoch)
        assert 0 <= int(epoch.min()) <= int(epoch.max()) < size


def test_any_step_can_be_asked_for_alone_and_in_any_order() -> None:
    forward = [batch_positions(97, 16, 3, "unlabeled", step).tolist() for step in range(40)]
    backward = [batch_positions(97, 16, 3, "unlabeled", step).tolist() for step in reversed(range(40))]
    assert forward == backward[::-1]


def test_streams_and_seeds_are_independent() -> None:
    batches = [batch_positions(500, 32, seed, stream, 0).tolist() for seed in (0, 1) for stream in ("unlabeled", "extra")]
    assert len({tuple(batch) for batch in batches}) == 4


def test_balanced_rows_have_every_class_equally_often() -> None:
    labels = torch.tensor([0, 2, 2, 2, 1, 0, 2, -1])
    rows = balanced(torch.tensor([0, 5, 4, 1, 2, 3, 6]), labels)
    assert rows.tolist() == [0, 5, 0, 5, 4, 4, 4, 4, 1, 2, 3, 6]
