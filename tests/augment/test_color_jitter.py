"""Color jitter against torchvision's definition carried out by Pillow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sample_images import from_pillow, sample_images, to_pillow

from crmatch.augment.operations import OPERATION_NAMES
from crmatch.augment.weak import ColorJitter
from reference import pillow_pipeline


@pytest.mark.parametrize("channels", [1, 3])
def test_jittered_images_equal_pillow_in_every_pixel(channels):
    images = sample_images(300, channels, 24, 19, np.random.default_rng(0))
    jitter = ColorJitter()
    draws = jitter.draw(300, torch.Generator().manual_seed(1))
    expected = []
    for picture, kinds, values in zip(to_pillow(images), draws.operations.tolist(), draws.values.tolist(), strict=True):
        for kind, value in zip(kinds, values, strict=True):
            picture = pillow_pipeline.OPERATIONS[OPERATION_NAMES[kind]](picture, value)
        expected.append(picture)
    assert torch.equal(jitter.apply(images, draws), from_pillow(expected))


def test_orders_are_uniform_and_values_fill_their_ranges():
    draws = ColorJitter(0.4, 0.3, 0.2, 0.1).draw(24_000, torch.Generator().manual_seed(2))
    orders, counts = torch.unique(draws.operations, dim=0, return_counts=True)
    assert len(orders) == 24
    assert (counts - 1000).abs().max() < 5 * 1000**0.5
    reaches = {"brightness": (0.6, 1.4), "contrast": (0.7, 1.3), "color": (0.8, 1.2), "hue": (-0.1, 0.1)}
    for name, (low, high) in reaches.items():
        values = draws.values[draws.operations == OPERATION_NAMES.index(name)]
        assert low <= values.min() < low + 0.01
        assert high - 0.01 < values.max() <= high


def test_impossible_reaches_are_refused():
    with pytest.raises(ValueError, match=r"hue of 0 to 0.5, got \[0.4, 0.4, 0.4, 0.6\]"):
        ColorJitter(hue=0.6)
