"""Batches of stored features are the batches of images, with a stored view in the place of a new one."""

from __future__ import annotations

import numpy as np
import torch

from crmatch.augment.batches import BatchMaker, Normalizer, build_policy
from crmatch.augment.feature_batches import FeatureBatches
from crmatch.augment.views import View
from crmatch.augment.weak import WeakAugmentation

VIEWS = (View("labeled", "labeled", "weak"), View("weak", "unlabeled", "weak"), View("strong", "unlabeled", "strong"))
COUNT, WIDTH = 20, 3
SIZES = {"labeled": 4, "unlabeled": 6, "extra": 0}
LABELS, LABELED, UNLABELED = torch.arange(COUNT) % 2, torch.arange(5), torch.arange(5, COUNT)
POLICY = build_policy("randaugment", "paper", True, True)


def bank(*numbers: int) -> list[np.ndarray]:
    """The features of row r in view v are (v, r, r)."""
    rows = np.arange(COUNT)
    return [np.stack([np.full(COUNT, number), rows, rows], axis=1).astype(np.float16) for number in numbers]


def batches(seed: int = 0) -> FeatureBatches:
    banks = {"none": bank(0), "weak": bank(1, 2), "strong": bank(3, 4, 5)}
    return FeatureBatches(banks, LABELS, LABELED, UNLABELED, VIEWS, SIZES, POLICY, seed)


def test_rows_and_labels_are_those_of_batches_of_images() -> None:
    images = torch.arange(COUNT, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    normalizer = Normalizer([0.5] * 3, [0.5] * 3, torch.float32)
    maker = BatchMaker(images, LABELS, LABELED, UNLABELED, VIEWS, SIZES, WeakAugmentation(0, False), POLICY, normalizer, 0)
    for step in (0, 1, 7):
        stored, made = batches().batch(step), maker.batch(step)
        assert torch.equal(stored.labels, made.labels)
        assert torch.equal(stored.unlabeled, made.unlabeled)
        pixels = ((made.views["weak"][:, 0, 0, 0] + 1) * 127.5).round()
        assert torch.equal(stored.views["weak"][:, 1, 0, 0], pixels)


def test_weak_and_strong_views_of_an_image_are_drawn_among_its_stored_ones() -> None:
    drawn: dict[str, set[float]] = {"labeled": set(), "weak": set(), "strong": set()}
    for step in range(30):
        batch = batches().batch(step)
        assert torch.equal(batch.views["weak"][:, 1:], batch.views["strong"][:, 1:])  # the same images
        for name, values in drawn.items():
            assert batch.views[name].shape == (SIZES["labeled" if name == "labeled" else "unlabeled"], WIDTH, 1, 1)
            values |= set(batch.views[name][:, 0, 0, 0].tolist())
    assert drawn == {"labeled": {1, 2}, "weak": {1, 2}, "strong": {3, 4, 5}}


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    first, again, other = batches().batch(3), batches().batch(3), batches(seed=1).batch(3)
    assert all(torch.equal(first.views[name], again.views[name]) for name in first.views)
    assert not torch.equal(first.views["strong"], other.views["strong"])


def test_a_pool_is_all_its_images_in_order() -> None:
    assert torch.equal(torch.cat([*batches().pool("unlabeled")])[:, 1, 0, 0], UNLABELED.float())
