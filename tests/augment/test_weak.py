"""The weak view's choices: padding, small rotations, jittered colors; each draws after the ones before it."""

from __future__ import annotations

import pytest
import torch

from crmatch.augment.operations import apply_operation
from crmatch.augment.weak import ColorJitter, WeakAugmentation, weak_views

IMAGES = torch.randint(50, 256, (16, 3, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
PLAIN = WeakAugmentation(3, True)


def views(weak: WeakAugmentation, seed: int = 1) -> torch.Tensor:
    return weak_views(IMAGES, weak, torch.Generator().manual_seed(seed))


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
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    expected = jitter.apply(views(PLAIN), jitter.draw(16, generator))
    assert torch.equal(views(PLAIN._replace(jitter=True)), expected)


@pytest.mark.parametrize("weak", [PLAIN, WeakAugmentation(2, True, "zero", 10.0, True)])
def test_views_are_a_function_of_the_generator_alone(weak: WeakAugmentation) -> None:
    assert torch.equal(views(weak), views(weak))
    assert not torch.equal(views(weak), views(weak, seed=2))
