"""Properties of every operation on any batch: independence of neighbors, order and layout; input unchanged; clear errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_images import sample_images

from crmatch.augment.operations import OPERATION_NAMES, OPERATIONS, apply_operation, apply_sequence

NEUTRAL = {
    **{name: 0.0 for name in OPERATIONS if OPERATIONS[name].low <= 0 <= OPERATIONS[name].high},
    **dict.fromkeys(["brightness", "contrast", "color", "sharpness", "scale"], 1.0),
    "posterize": 8.0,
    "solarize": 256.0,
}
ALWAYS_CHANGES = {"autocontrast", "equalize", "invert", "mirror", "hue"}  # hue: the way over HSV bytes rounds, as Pillow does


@st.composite
def batches(draw, most=12):
    """Images (N, C, H, W) of any legal kind, three operations for each, and their values."""
    count, channels = draw(st.integers(1, most)), draw(st.sampled_from([1, 3]))
    height, width = draw(st.integers(8, 40)), draw(st.integers(8, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    images = sample_images(count, channels, height, width, generator)
    kinds = generator.integers(0, len(OPERATIONS), (count, 3))
    low, high = (np.array([getattr(operation, end) for operation in OPERATIONS.values()]) for end in ("low", "high"))
    values = low[kinds] + (high - low)[kinds] * generator.choice([0.0, 0.5, 1.0, generator.random()], (count, 3))
    return images, torch.from_numpy(kinds), torch.from_numpy(values)


@settings(max_examples=60)
@given(batches(), st.randoms(use_true_random=False))
def test_neither_neighbors_nor_order_nor_memory_layout_matter_and_input_is_never_changed(batch, random):
    images, kinds, values = batch
    before, expected = images.clone(), apply_sequence(images, kinds, values)
    assert expected.is_contiguous()
    assert expected.dtype == torch.uint8
    alone = [apply_sequence(images[i : i + 1], kinds[i : i + 1], values[i : i + 1]) for i in range(len(images))]
    assert torch.equal(torch.cat(alone), expected)
    order = torch.tensor(random.sample(range(len(images)), len(images)))
    assert torch.equal(apply_sequence(images[order], kinds[order], values[order]), expected[order])
    height, width = images.shape[2:]
    framed = torch.zeros(*images.shape[:2], height + 3, width + 5, dtype=torch.uint8)
    framed[:, :, 1 : height + 1, 2 : width + 2] = images
    layouts = [
        images,
        images.contiguous(memory_format=torch.channels_last),
        images.transpose(2, 3).contiguous().transpose(2, 3),
        framed[:, :, 1 : height + 1, 2 : width + 2],
    ]
    for layout in layouts:
        assert torch.equal(apply_sequence(layout, kinds, values), expected)
        assert torch.equal(layout, before)


@settings(max_examples=30)
@given(batches(most=6), st.sampled_from(sorted(set(OPERATIONS) - ALWAYS_CHANGES)))
def test_neutral_values_return_equal_pixels_in_new_memory(batch, name):
    images = batch[0]
    result = apply_operation(name, images, torch.full((len(images),), NEUTRAL[name]))
    assert torch.equal(result, images)
    result.zero_()
    assert torch.equal(images, batch[0])
    assert result.data_ptr() != images.data_ptr()


def test_a_batch_larger_than_one_chunk_gives_the_same_as_its_parts(monkeypatch):
    generator = np.random.default_rng(3)
    images = sample_images(50, 3, 12, 17, generator)
    kinds = torch.from_numpy(generator.integers(0, 14, (50, 2)))
    values = torch.full((50, 2), 0.2, dtype=torch.float64)
    values[kinds == OPERATION_NAMES.index("posterize")] = 3
    whole = apply_sequence(images, kinds, values)
    monkeypatch.setattr("crmatch.augment.operations._CHUNK_BYTES", 7 * 3 * 12 * 17)
    assert torch.equal(apply_sequence(images, kinds, values), whole)


IMAGES = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "images", "values", "message"),
    [
        ("rotat", IMAGES, torch.zeros(4), "Did you mean 'rotate'"),
        ("rotate", IMAGES.float(), torch.zeros(4), "must be uint8 .* got torch.float32"),
        ("rotate", IMAGES[0], torch.zeros(3), r"\(N, C, H, W\) .* got torch.uint8 \(3, 16, 16\)"),
        ("rotate", IMAGES[:, :2], torch.zeros(4), r"1 or 3 channels .* \(4, 2, 16, 16\)"),
        ("rotate", IMAGES[..., :7], torch.zeros(4), r"sides from 8 to 512, .* \(4, 3, 16, 7\)"),
        ("rotate", IMAGES, torch.zeros(3), r"one value per image, shape \(4,\), got \(3,\)"),
        ("posterize", IMAGES, torch.full((4,), 9.0), r"from 1 to 8 \(bits\), got 9 to 9"),
        ("color", IMAGES, torch.tensor([0.0, 1, 2, -0.1]), r"from 0 to 2 \(factor\), got -0.1 to 2"),
        ("shear_x", IMAGES, torch.full((4,), torch.nan), "shear_x takes values from -1 to 1"),
    ],
)
def test_wrong_requests_are_told_what_would_work(name, images, values, message):
    with pytest.raises(ValueError, match=message):
        apply_operation(name, images, values)
