"""The weak view's crop and mirror against np.pad, a slice and np.fliplr."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_images import sample_images

from crmatch.augment.kernels.geometry import crop_and_mirror
from reference import pillow_pipeline


@settings(max_examples=80, deadline=None)
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


def test_every_offset_of_the_paper_equals_the_reference_pipeline():
    images = torch.randint(0, 256, (162, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    top, left, mirrored = (axis.flatten() for axis in torch.meshgrid(*map(torch.arange, (9, 9, 2)), indexing="ij"))
    result = crop_and_mirror(images, top, left, mirrored.bool(), 4)
    for image, view, *draw in zip(images, result, top.tolist(), left.tolist(), mirrored.tolist(), strict=True):
        expected = pillow_pipeline.weak(image.permute(1, 2, 0).numpy(), *draw, padding=4)
        assert np.array_equal(view.permute(1, 2, 0).numpy(), expected)


def test_the_largest_reflected_padding_is_the_side_minus_one():
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    corner = torch.tensor([14])
    result = crop_and_mirror(images, corner, corner, torch.tensor([False]), 7)
    expected = np.pad(images[0, 0].numpy(), 7, mode="reflect")[14:, 14:]
    assert np.array_equal(result[0, 0].numpy(), expected)
    with pytest.raises(ValueError, match=r"cannot pad 8 x 8 pixels by 8 with mode 'reflect'; use mode 'zero', or .* 7"):
        crop_and_mirror(images, corner, corner, torch.tensor([False]), 8)
    with pytest.raises(ValueError, match="with mode 'circular'"):
        crop_and_mirror(images, corner, corner, torch.tensor([False]), 2, "circular")


@pytest.mark.parametrize("offset", [-1, 9])
def test_offsets_outside_the_padding_are_refused(offset):
    images = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"padded by 4 begin at 0 to 8, got .*" + str(offset)):
        crop_and_mirror(images, torch.tensor([0]), torch.tensor([offset]), torch.tensor([True]), 4)
