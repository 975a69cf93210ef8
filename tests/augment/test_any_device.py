"""Policies on a device that holds no data: nothing may read pixels on the host, and shapes follow from draws alone."""

from __future__ import annotations

import pytest
import torch

from crmatch.augment.ctaugment import CTAugment
from crmatch.augment.geometry import crop_and_mirror
from crmatch.augment.jitter import ColorJitter
from crmatch.augment.randaugment import RandAugment
from crmatch.augment.variants import VARIANTS


@pytest.fixture(params=[1, 3])
def images(request):
    return torch.empty(300, request.param, 32, 24, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize("policy", [*(RandAugment(variant) for variant in VARIANTS), CTAugment()])
def test_policies_never_wait_for_pixels(policy, images):
    views = policy.apply(images, policy.draw(300, 32, 24, torch.Generator().manual_seed(0)))
    assert views.device.type == "meta"
    assert views.shape == images.shape


def test_jitter_and_crop_never_wait_for_pixels(images):
    jitter = ColorJitter()
    assert jitter.apply(images, jitter.draw(300, torch.Generator())).device.type == "meta"
    offsets = torch.arange(300) % 9
    for mode in ("reflect", "zero"):
        assert crop_and_mirror(images, offsets, offsets, offsets > 4, 4, mode).device.type == "meta"
