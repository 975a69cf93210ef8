"""CTAugment: bins, weights and updates against the specification written as a loop, and views against Pillow."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sample_images import sample_images

from conftest import tiny_spec, training_of
from crmatch.augment.ctaugment import LEARNED_OPERATIONS, CTAugment, CTAugmentDraws
from reference import pillow_pipeline

NAMES = list(LEARNED_OPERATIONS)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def learn_one_bin(policy, name, strength, proximity, times):
    """Feed probes that all use one operation with one strength."""
    choices = torch.full((times, 1), NAMES.index(name))
    strengths = torch.full((times, 1, 2), strength, dtype=torch.float64)
    draws = CTAugmentDraws(choices, strengths, torch.zeros(times, 2, 4, dtype=torch.int64))
    policy.learn(draws, torch.full((times,), proximity))


def test_there_are_nineteen_operations_with_the_published_bins():
    bins = {name: learned.bins for name, learned in LEARNED_OPERATIONS.items()}
    assert len(bins) == 19
    assert bins.pop("identity") == ()
    assert bins.pop("posterize") == (8,)
    assert bins.pop("rescale") == (17, 6)
    assert set(bins.values()) == {(17,)}


def test_rates_of_one_draw_all_bins_uniformly():
    policy = CTAugment()
    assert all(rate == 1 for lists in policy.rates().values() for rates in lists for rate in rates)
    draws = policy.draw(60_000, 32, 32, seeded())
    for name, learned in LEARNED_OPERATIONS.items():
        strengths = draws.strengths[draws.choices == NAMES.index(name)]
        trials = len(strengths)
        assert abs(trials - 120_000 / 19) < 5 * math.sqrt(120_000 / 19)
        for parameter, bins in enumerate(learned.bins):
            assert 0 <= strengths[:, parameter].min() < 0.01
            assert 0.99 < strengths[:, parameter].max() < 1
            counts = Counter((strengths[:, parameter] * bins).long().tolist())
            assert sorted(counts) == list(range(bins))
            assert all(abs(count - trials / bins) < 5 * math.sqrt(trials / bins) for count in counts.values())


def test_a_bin_of_proximity_zero_leaves_the_support_after_23_updates():
    policy = CTAugment()
    row = NAMES.index("rotate")
    learn_one_bin(policy, "rotate", 0.01, proximity=0.0, times=22)
    assert policy.weights()[row, 0, 0] > 0.8
    learn_one_bin(policy, "rotate", 0.01, proximity=0.0, times=1)
    assert policy.rates()["rotate"][0][0] == pytest.approx(0.99**23)
    assert policy.weights()[row, 0, 0] == 0
    draws = policy.draw(20_000, 32, 32, seeded())
    strengths = draws.strengths[draws.choices == row][:, 0]
    assert strengths.min() >= 1 / 17
    probes = policy.draw(20_000, 32, 32, seeded(), probe=True)
    assert probes.strengths[probes.choices == row][:, 0].min() < 1 / 17


def test_weights_follow_the_formula():
    policy = CTAugment(decay=0.9, threshold=0.85)
    generator = np.random.default_rng(0)
    for strength in generator.random(200):
        learn_one_bin(policy, "shear_x", strength, generator.random(), times=1)
    rates = np.array(policy.rates()["shear_x"][0])
    expected = rates + 0.1
    expected = expected / expected.max()
    expected[expected < 0.85] = 0
    assert policy.weights()[NAMES.index("shear_x"), 0].tolist() == pytest.approx(expected.tolist())
    assert 0 < (expected == 0).sum() < 17


def test_drawn_bins_follow_the_weights():
    policy = CTAugment(threshold=0.2)
    learn_one_bin(policy, "posterize", 0.5, proximity=0.0, times=60)
    weights = policy.weights()[NAMES.index("posterize"), 0, :8]
    draws = policy.draw(80_000, 32, 32, seeded(1))
    bins = (draws.strengths[draws.choices == NAMES.index("posterize")][:, 0] * 8).long()
    shares = torch.bincount(bins, minlength=8).double() / len(bins)
    expected = weights / weights.sum()
    assert np.abs(shares.numpy() - expected).max() < 5 * math.sqrt(0.14 / len(bins))
    assert 0.2 < weights[3] < 0.6


def test_updates_equal_a_loop_over_images_and_operations():
    policy = CTAugment()
    expected = {name: [[1.0] * bins for bins in learned.bins] for name, learned in LEARNED_OPERATIONS.items()}
    for seed in range(30):
        draws = policy.draw(64, 32, 32, seeded(seed), probe=True)
        proximity = torch.rand(64, generator=seeded(100 + seed))
        policy.learn(draws, proximity)
        for i in range(64):
            for k in range(2):
                rates = expected[NAMES[draws.choices[i, k]]]
                for parameter, rate in enumerate(rates):
                    position = int(draws.strengths[i, k, parameter].item() * len(rate) * 0.999)
                    rate[position] = rate[position] * 0.99 + proximity[i].item() * (1 - 0.99)
    for name, lists in policy.rates().items():
        for learned, loop in zip(lists, expected[name], strict=True):
            assert learned == pytest.approx(loop, abs=1e-12)


def test_state_restores_the_rates_exactly_and_refuses_another_shape():
    policy = CTAugment()
    policy.learn(policy.draw(64, 32, 32, seeded(), probe=True), torch.rand(64, generator=seeded(1)))
    other = CTAugment()
    other.load_state(policy.state())
    assert other.rates() == policy.rates()
    saved = policy.state()
    learn_one_bin(policy, "blur", 0.5, 0.0, 3)
    assert policy.rates() != other.rates()
    policy.load_state(saved)
    assert policy.rates() == other.rates()
    with pytest.raises(ValueError, match=r"saved rates have shape \(3,\)"):
        policy.load_state({"rates": torch.ones(3)})


def spec_value(name, strength, second, width):
    """An operation of the reference and its value, as the specification prints them (section 4.7)."""
    signed = 2 * strength - 1
    filters = ("lanczos", "bicubic", "bilinear", "box", "hamming", "nearest")
    return {
        "autocontrast": ("autocontrast_blend", strength),
        "equalize": ("equalize_blend", strength),
        "invert": ("invert_blend", strength),
        "blur": ("blur", strength),
        "smooth": ("smooth", strength),
        **{factor: (factor, 0.1 + 1.9 * strength) for factor in ("brightness", "color", "contrast", "sharpness")},
        "cutout": ("identity", 0),
        "identity": ("identity", 0),
        "posterize": ("posterize", 1 + int(7.999 * strength)),
        "rescale": (f"rescale_{filters[int(second * 5.99)]}", 0.25 * strength),
        "rotate": ("rotate", int(np.round(signed * 45))),
        "shear_x": ("shear_x", signed * 0.3),
        "shear_y": ("shear_y", signed * 0.3),
        "solarize": ("solarize", int(255.999 * strength)),
        "translate_x": ("translate_x", signed * 0.3),
        "translate_y": ("translate_y", signed * 0.3),
    }[name]


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 16, 16), (3, 21, 40)])
def test_views_equal_the_specification_carried_out_by_pillow(channels, height, width):
    images = sample_images(400, channels, height, width, np.random.default_rng(0))
    before = images.clone()
    policy = CTAugment()
    draws = policy.draw(400, height, width, seeded(5))
    views = policy.apply(images, draws)
    for i in range(400):
        array = images[i].permute(1, 2, 0).numpy()
        array = array[..., 0] if channels == 1 else array
        for k in range(2):
            name = NAMES[draws.choices[i, k]]
            operation, value = spec_value(name, *draws.strengths[i, k].tolist(), width)
            array = np.array(pillow_pipeline.OPERATIONS[operation](Image.fromarray(array), value))
            top, left, bottom, right = draws.boxes[i, k].tolist()
            assert (name == "cutout") == (bottom > top and right > left)
            array[top:bottom, left:right] = 127
        top, left, bottom, right = draws.boxes[i, 2].tolist()
        array[top:bottom, left:right] = 127
        assert np.array_equal(views[i].permute(1, 2, 0).numpy().squeeze(), array)
    assert torch.equal(images, before)


def test_cutout_sides_are_the_specification_s():
    policy = CTAugment()
    for side, final in [(32, 16), (96, 48)]:
        draws = policy.draw(20_000, side, side, seeded(2))
        last = draws.boxes[:, 2]
        assert (last[:, 2:] - last[:, :2]).max() == final
        assert (last[:, 2:] - last[:, :2]).min() == final // 2
        cut = draws.choices == NAMES.index("cutout")
        strengths, boxes = draws.strengths[cut][:, 0], draws.boxes[:, :2][cut]
        sides = 1 + (strengths * 0.499 * side).long()
        inside = ((boxes[:, :2] > 0) & (boxes[:, 2:] < side)).all(1)
        assert torch.equal((boxes[:, 2] - boxes[:, 0])[inside], sides[inside])
        assert torch.equal((boxes[:, 3] - boxes[:, 1])[inside], sides[inside])


def test_probes_and_remixmatch_views_have_no_final_cutout():
    for draws in (CTAugment().draw(50, 32, 32, seeded(), probe=True), CTAugment(final_cutout=False).draw(50, 32, 32, seeded())):
        last = draws.boxes[:, -1]
        assert torch.equal(last[:, :2], last[:, 2:])


@pytest.mark.parametrize("unit", ["side", "pixels"])
def test_translations_are_shares_of_the_side_or_as_in_google_s_code_of_a_pixel_which_moves_nothing(stripes: Path, unit: str):
    images = sample_images(40, 3, 32, 32, np.random.default_rng(1))
    choices = torch.tensor([[NAMES.index("translate_x"), NAMES.index("translate_y")]]).expand(40, 2)
    strengths = torch.rand(40, 2, 2, generator=seeded(3), dtype=torch.float64)
    draws = CTAugmentDraws(choices, strengths, torch.zeros(40, 3, 4, dtype=torch.int64))
    spec = tiny_spec(stripes, **{"augmentation.policy": "ctaugment", "augmentation.translation": unit})
    moved = training_of(spec, stripes).batches.policy.apply(images, draws)
    assert torch.equal(moved, images) == (unit == "pixels")


def test_depth_is_the_number_of_operations():
    policy = CTAugment(depth=3)
    draws = policy.draw(10, 16, 16, seeded())
    assert draws.choices.shape == (10, 3)
    assert draws.boxes.shape == (10, 4, 4)
    assert policy.apply(torch.zeros(10, 1, 16, 16, dtype=torch.uint8), draws).shape == (10, 1, 16, 16)


def test_without_geometry_no_operation_that_moves_pixels_is_drawn():
    names = {NAMES[choice] for choice in CTAugment(geometry=False).draw(500, 16, 16, seeded()).choices.flatten().tolist()}
    assert set(NAMES) - names == {"rescale", "rotate", "shear_x", "shear_y", "translate_x", "translate_y"}
