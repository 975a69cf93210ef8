"""Policies work on any device and with any default dtype.

The meta device holds no data, so nothing can copy pixels to the host: shapes must follow from the draws alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sample_images import sample_images

from crmatch.augment.ctaugment import CTAugment
from crmatch.augment.kernels.geometry import crop_and_mirror
from crmatch.augment.operations import apply_sequence
from crmatch.augment.randaugment import RandAugment
from crmatch.augment.variants import VARIANTS
from crmatch.augment.weak import draw_jitter


@pytest.fixture(params=[1, 3])
def images(request):
    return torch.empty(300, request.param, 32, 24, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize("policy", [*(RandAugment(variant) for variant in VARIANTS), CTAugment()])
def test_policies_never_wait_for_pixels(policy, images):
    views = policy.apply(images, policy.draw(300, 32, 24, torch.Generator().manual_seed(0)))
    assert views.device.type == "meta"
    assert views.shape == images.shape


def test_jitter_and_crop_never_wait_for_pixels(images):
    assert apply_sequence(images, *draw_jitter(300, torch.Generator())).device.type == "meta"
    offsets = torch.arange(300) % 9
    for mode in ("reflect", "zero"):
        assert crop_and_mirror(images, offsets, offsets, offsets > 4, 4, mode).device.type == "meta"


@pytest.mark.parametrize("policy", [*(RandAugment(variant) for variant in VARIANTS), CTAugment()])
def test_the_default_dtype_changes_nothing(policy):
    images = sample_images(120, 3, 20, 20, np.random.default_rng(0))
    expected = policy.apply(images, policy.draw(120, 20, 20, torch.Generator().manual_seed(1)))
    torch.set_default_dtype(torch.float64)
    try:
        views = policy.apply(images, policy.draw(120, 20, 20, torch.Generator().manual_seed(1)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(views, expected)


def test_views_are_ordinary_tensors():
    policy = RandAugment()
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    views = policy.apply(images, policy.draw(4, 8, 8, torch.Generator()))
    assert not views.is_inference()
