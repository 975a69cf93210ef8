"""Weak views: crop and mirror against NumPy, color jitter against Pillow, and the order of their draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_images import from_pillow, sample_images, to_pillow

from crmatch.augment.kernels.geometry import crop_and_mirror
from crmatch.augment.operations import OPERATION_NAMES, apply_operation, apply_sequence
from crmatch.augment.weak import WeakAugmentation, draw_jitter, weak_views
from reference import pillow_pipeline

IMAGES = torch.randint(50, 256, (16, 3, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
PLAIN = WeakAugmentation(3, True)


def views(weak: WeakAugmentation, seed: int = 1) -> torch.Tensor:
    return weak_views(IMAGES, weak, torch.Generator().manual_seed(seed))


@settings(max_examples=80)
@given(
    st.integers(8, 40),
    st.integers(8, 40),
    st.sampled_from([1, 3]),
    st.integers(0, 7),
    st.sampled_from(["reflect", "zero"]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_crop_and_mirror_equals_numpy(height, width, channels, padding, mode, channels_last, seed):
    generator = np.random.default_rng(seed)
    images = sample_images(9, channels, height, width, generator)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    before = images.clone()
    top, left = torch.from_numpy(generator.integers(0, 2 * padding + 1, (2, 9)))
    mirrored = torch.from_numpy(generator.random(9) < 0.5)
    result = crop_and_mirror(images, top, left, mirrored, padding, mode)
    pad = ((0, 0), (padding, padding), (padding, padding))
    for i in range(9):
        padded = np.pad(images[i].numpy(), pad, mode="reflect" if mode == "reflect" else "constant")
        expected = padded[:, top[i] : top[i] + height, left[i] : left[i] + width]
        expected = expected[:, :, ::-1] if mirrored[i] else expected
        assert np.array_equal(result[i].numpy(), expected)
    assert torch.equal(images, before)
    assert result.is_contiguous()


@pytest.mark.parametrize("channels", [1, 3])
def test_jittered_images_equal_pillow_in_every_pixel(channels):
    images = sample_images(300, channels, 24, 19, np.random.default_rng(0))
    draws = draw_jitter(300, torch.Generator().manual_seed(1))
    expected = []
    for picture, kinds, values in zip(to_pillow(images), draws.operations.tolist(), draws.values.tolist(), strict=True):
        for kind, value in zip(kinds, values, strict=True):
            picture = pillow_pipeline.OPERATIONS[OPERATION_NAMES[kind]](picture, value)
        expected.append(picture)
    assert torch.equal(apply_sequence(images, *draws), from_pillow(expected))


def test_jitter_has_uniform_orders_and_values_that_fill_their_ranges():
    draws = draw_jitter(24_000, torch.Generator().manual_seed(2))
    orders, counts = torch.unique(draws.operations, dim=0, return_counts=True)
    assert len(orders) == 24
    assert (counts - 1000).abs().max() < 5 * 1000**0.5
    reaches = {"brightness": (0.6, 1.4), "contrast": (0.6, 1.4), "color": (0.6, 1.4), "hue": (-0.1, 0.1)}
    for name, (low, high) in reaches.items():
        values = draws.values[draws.operations == OPERATION_NAMES.index(name)]
        assert low <= values.min() < low + 0.01
        assert high - 0.01 < values.max() <= high


def test_zero_padding_shows_black_where_reflection_repeats_the_image() -> None:
    zero, reflected = views(PLAIN._replace(padding_mode="zero")), views(PLAIN)
    black = zero == 0
    assert bool(black.any())
    assert torch.equal(zero[~black], reflected[~black])
    assert int(reflected.min()) >= 50


def test_a_rotation_turns_the_cropped_and_mirrored_view_by_at_most_its_degrees() -> None:
    turned = views(PLAIN._replace(rotation=10.0))
    generator = torch.Generator().manual_seed(1)
    weak_views(IMAGES, PLAIN, generator)
    angles = (torch.rand(16, generator=generator, dtype=torch.float64) * 2 - 1) * 10
    assert torch.equal(turned, apply_operation("rotate", views(PLAIN), angles))


def test_jitter_is_torchvisions_color_jitter_of_the_view() -> None:
    generator = torch.Generator().manual_seed(1)
    weak_views(IMAGES, PLAIN, generator)
    expected = apply_sequence(views(PLAIN), *draw_jitter(16, generator))
    assert torch.equal(views(PLAIN._replace(jitter=True)), expected)


@pytest.mark.parametrize("weak", [PLAIN, WeakAugmentation(2, True, "zero", 10.0, True)])
def test_views_are_a_function_of_the_generator_and_do_not_depend_on_which_rows_are_rendered(weak: WeakAugmentation) -> None:
    assert torch.equal(views(weak), views(weak))
    assert not torch.equal(views(weak), views(weak, seed=2))
    rows = slice(5, 11)
    assert torch.equal(views(weak)[rows], weak_views(IMAGES, weak, torch.Generator().manual_seed(1), rows))
