"""RandAugment: what each variant draws, counted over many draws, and that drawn views are Pillow's."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from sample_images import sample_images

from crmatch.augment.operations import OPERATION_NAMES, OPERATIONS, apply_operation
from crmatch.augment.randaugment import RandAugment
from crmatch.augment.variants import RANDAUGMENT_OPERATIONS, VARIANTS
from reference import pillow_pipeline

COUNT = 40_000
FACTORS = {"brightness", "color", "contrast", "sharpness"}
SIGNED = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}
LEVELS = range(1, 10)


def draw(variant, count=COUNT, height=32, width=32, seed=0):
    return RandAugment(variant).draw(count, height, width, torch.Generator().manual_seed(seed))


def values_of(draws, name):
    return draws.values[draws.operations == OPERATION_NAMES.index(name)]


def within_five_deviations(hits, trials, probability):
    deviation = math.sqrt(trials * probability * (1 - probability))
    return abs(hits - trials * probability) <= 5 * deviation


@pytest.mark.parametrize("variant", VARIANTS)
def test_operations_are_uniform_over_the_fourteen_and_featmatchs_sixteen(variant):
    expected = {*RANDAUGMENT_OPERATIONS, "invert", "mirror"} if variant == "featmatch" else set(RANDAUGMENT_OPERATIONS)
    draws = draw(variant)
    counts = Counter(OPERATION_NAMES[kind] for kind in draws.operations.flatten().tolist())
    assert set(counts) == expected
    assert all(within_five_deviations(count, draws.operations.numel(), 1 / len(expected)) for count in counts.values())


@pytest.mark.parametrize(
    ("variant", "shares"),
    [
        ("paper", {2: 1.0}),
        ("google", {0: 0.25, 1: 0.5, 2: 0.25}),
        ("author", {0: 0.25, 1: 0.5, 2: 0.25}),
        ("kekmodel", {0: 0.25, 1: 0.5, 2: 0.25}),
        ("usb", {3: 1.0}),
        ("featmatch", {2: 1.0}),
    ],
)
def test_share_of_images_by_number_of_operations(variant, shares):
    counts = Counter(draw(variant).applied.sum(1).tolist())
    assert set(counts) == set(shares)
    assert all(within_five_deviations(counts[number], COUNT, share) for number, share in shares.items())


RANGES = {
    "paper": dict.fromkeys(FACTORS, (0.05, 0.95)) | dict.fromkeys(SIGNED, (-0.3, 0.3)),
    "featmatch": dict.fromkeys(FACTORS, (0.1, 1.9))
    | dict.fromkeys(("shear_x", "shear_y"), (-0.3, 0.3))
    | dict.fromkeys(("translate_x", "translate_y"), (-150 / 331, 150 / 331)),
}
RANGES["usb"] = RANGES["paper"]
BITS = {
    "paper": dict.fromkeys((4, 5, 6, 7, 8), 1 / 5),
    "usb": dict.fromkeys((4, 5, 6, 7), 1 / 4),
    "featmatch": {4: 1 / 8, 5: 1 / 4, 6: 1 / 4, 7: 1 / 4, 8: 1 / 8},
}


@pytest.mark.parametrize("variant", RANGES)
def test_uniform_magnitudes_fill_the_published_ranges_in_both_directions(variant):
    draws = draw(variant)
    for name, (low, high) in (RANGES[variant] | {"rotate": (-30, 30), "solarize": (0, 256)}).items():
        values = values_of(draws, name)
        assert low <= values.min() < low + 0.01 * (high - low), name
        assert high - 0.01 * (high - low) < values.max() <= high, name
        assert within_five_deviations((values < (low + high) / 2).sum().item(), len(values), 0.5), name
    bits = Counter(values_of(draws, "posterize").tolist())
    assert set(bits) == set(BITS[variant])
    assert all(within_five_deviations(bits[bit], bits.total(), share) for bit, share in BITS[variant].items())


@pytest.mark.parametrize("variant", ["google", "author", "kekmodel"])
def test_level_magnitudes_are_the_published_steps(variant):
    width, height = 40, 96
    draws = draw(variant, height=height, width=width)
    factor = {level: (0.05 + level * 0.9 / 10 if variant == "kekmodel" else 0.1 + level * 1.8 / 10) for level in LEVELS}
    bits = {level: 4 + int(0.4 * level) if variant == "kekmodel" else 4 - int(0.4 * level) for level in LEVELS}
    pixels = {
        "google": lambda level, side: level,
        "author": lambda level, side: round(0.03 * level * side),
        "kekmodel": lambda level, side: int(level * 0.3 / 10 * side),
    }[variant]
    expected = {
        **{name: set(factor.values()) for name in FACTORS},
        "posterize": set(bits.values()),
        "solarize": {256 - int(25.6 * level) for level in LEVELS},
        "rotate": {sign * 3 * level for level in LEVELS for sign in (-1, 1)},
        "shear_x": {sign * 0.03 * level for level in LEVELS for sign in (-1, 1)},
        "shear_y": {sign * 0.03 * level for level in LEVELS for sign in (-1, 1)},
        "translate_x": {sign * pixels(level, width) / width for level in LEVELS for sign in (-1, 1)},
        "translate_y": {sign * pixels(level, height) / height for level in LEVELS for sign in (-1, 1)},
    }
    for name, values in expected.items():
        found = {round(value, 9) for value in values_of(draws, name).tolist()}
        assert found == {round(value, 9) for value in values}, name
    for name in SIGNED:
        values = values_of(draws, name)
        assert within_five_deviations((values < 0).sum().item(), (values != 0).sum().item(), 0.5), name


def test_cutout_of_the_paper_is_half_the_side_and_clipped():
    for side, covered in [(32, 16), (84, 42), (96, 48), (33, 16)]:
        top, left, bottom, right = draw("paper", height=side, width=side).boxes.unbind(1)
        assert (bottom - top).max() == (right - left).max() == covered
        assert (bottom - top).min() == covered - covered // 2
        assert top.min() == left.min() == 0
        assert bottom.max() == right.max() == side
        whole = ((bottom - top == covered) & (right - left == covered)).sum().item()
        assert within_five_deviations(whole, COUNT, ((side - covered + 1) / side) ** 2)


def test_cutout_of_google_is_16_pixels_at_any_size():
    for side in (32, 96):
        top, left, bottom, right = draw("google", height=side, width=side).boxes.unbind(1)
        assert (bottom - top).max() == (right - left).max() == 16
        assert (bottom - top).min() == 8


@pytest.mark.parametrize("variant", ["author", "kekmodel", "usb"])
def test_cutout_of_the_ports_is_pillows_rectangle(variant):
    height, width = 24, 40
    generator = torch.Generator().manual_seed(9)
    policy = RandAugment(variant)
    for _ in range(60):
        state = generator.get_state()
        box = policy.draw(1, height, width, generator).boxes[0].tolist()
        end = generator.get_state()
        # The box's three numbers are the last ones drawn: replay the rest to find them.
        replay = torch.Generator()
        replay.set_state(state)
        shape = (1, policy.variant.num_ops)
        torch.randint(14, shape, generator=replay)
        torch.rand(shape, generator=replay)
        if policy.variant.strength == "level":
            torch.randint(1, 10, shape, generator=replay)
            torch.rand(shape, generator=replay)
        else:
            torch.rand(shape, generator=replay, dtype=torch.float64)
        share, row, column = torch.rand(1, 3, generator=replay, dtype=torch.float64)[0].tolist()
        assert torch.equal(replay.get_state(), end)
        side = share * 0.5 * width if variant == "usb" else 16
        drawn = pillow_pipeline.rectangle(height, width, row * height, column * width, side)
        covered = np.zeros((height, width), dtype=bool)
        covered[box[0] : box[2], box[1] : box[3]] = True
        assert np.array_equal(covered, drawn)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 16, 16), (3, 20, 45)])
def test_views_equal_the_pillow_pipeline(variant, channels, height, width):
    images = sample_images(300, channels, height, width, np.random.default_rng(1))
    before = images.clone()
    policy = RandAugment(variant)
    draws = policy.draw(300, height, width, torch.Generator().manual_seed(2))
    views = policy.apply(images, draws)
    assert torch.equal(images, before)
    color = policy.variant.cutout.color if channels == 3 else {127: 127, 125: 123}[policy.variant.cutout.color[0]]
    for i in range(300):
        array = images[i].permute(1, 2, 0).numpy()
        operations = [
            (OPERATION_NAMES[kind], value)
            for kind, value, applied in zip(*(field[i].tolist() for field in draws[:3]), strict=True)
            if applied
        ]
        if variant == "google":
            array = pillow_pipeline.google(np.repeat(array, 3 // channels, axis=2), operations)[..., :channels]
            operations = []
        array = array[..., 0] if channels == 1 else array
        expected = pillow_pipeline.strong(array, operations, draws.boxes[i].tolist(), color)
        assert np.array_equal(views[i].permute(1, 2, 0).numpy().squeeze(), expected), operations


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_geometry_no_operation_that_moves_pixels_is_drawn(variant):
    draws = RandAugment(variant, geometry=False).draw(500, 16, 16, torch.Generator().manual_seed(0))
    drawn = {OPERATION_NAMES[position] for position in draws.operations.flatten().tolist()}
    assert set(VARIANTS[variant].operations) - drawn == SIGNED | ({"mirror"} if variant == "featmatch" else set())


def test_geometric_operations_are_exactly_those_that_move_a_bright_pixel():
    image = torch.zeros(1, 1, 16, 16, dtype=torch.uint8)
    image[..., 3, 2] = 255
    for name, operation in OPERATIONS.items():
        value = torch.tensor([256.0 if name == "solarize" else operation.high / 4])
        changed = apply_operation(name, image, value)
        moved = (changed if name != "invert" else ~changed).argmax() != image.argmax()
        assert moved == operation.geometric, name
