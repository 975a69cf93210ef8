"""Every operation equals Pillow's result in every pixel, on more than 10,000 images each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sample_images import from_pillow, sample_images, to_pillow

from crmatch.augment.operations import FAMILIES, OPERATION_NAMES, OPERATIONS, apply_operation, apply_sequence
from crmatch.augment.variants import RANDAUGMENT_OPERATIONS
from reference import pillow_pipeline

IMAGES_PER_OPERATION = 10_000
FIXED_SIZES = [(8, 8), (8, 97), (97, 8), (97, 97), (32, 32), (9, 15), (96, 96), (16, 45)]


def test_the_reference_covers_every_operation_but_cutout():
    assert set(pillow_pipeline.OPERATIONS) == set(OPERATIONS) - {"cutout"}
    assert set(RANDAUGMENT_OPERATIONS) <= set(OPERATIONS)
    assert len(RANDAUGMENT_OPERATIONS) == 14


def test_operations_of_a_family_stand_together_in_the_table():
    families = [operation.family for operation in OPERATIONS.values()]
    assert sorted(families, key=["", *FAMILIES].index) == families


@pytest.mark.parametrize("name", sorted(pillow_pipeline.OPERATIONS))
def test_operation_equals_pillow_in_every_pixel(name):
    generator = np.random.default_rng([ord(letter) for letter in name])
    checked = 0
    while checked < IMAGES_PER_OPERATION:
        number = checked // 200
        height, width = FIXED_SIZES[number] if number < len(FIXED_SIZES) else random_size(generator)
        images = sample_images(200, 1 if number % 3 == 2 else 3, height, width, generator)
        if number % 2:
            images = images.contiguous(memory_format=torch.channels_last)
        values = torch.from_numpy(value_samples(name, 200, generator))
        expected = [
            pillow_pipeline.OPERATIONS[name](picture, value)
            for picture, value in zip(to_pillow(images), values.tolist(), strict=True)
        ]
        assert torch.equal(apply_operation(name, images, values), from_pillow(expected)), (name, height, width)
        checked += len(images)


@pytest.mark.parametrize("name", ["translate_x", "translate_y", "shear_x", "shear_y", "rotate", "scale"])
def test_warps_equal_pillow_where_positions_fall_on_pixel_borders(name):
    low, high = OPERATIONS[name].low, OPERATIONS[name].high
    round_numbers = np.linspace(low, high, 401)
    steps = [math.nextafter(value, -math.inf) for value in round_numbers[1:]]
    values = torch.tensor([*round_numbers, *steps], dtype=torch.float64)
    for height, width in [(50, 50), (8, 25), (31, 64)]:
        images = sample_images(len(values), 1, height, width, np.random.default_rng(height))
        expected = [
            pillow_pipeline.OPERATIONS[name](picture, value)
            for picture, value in zip(to_pillow(images), values.tolist(), strict=True)
        ]
        assert torch.equal(apply_operation(name, images, values), from_pillow(expected)), (name, height, width)


def test_a_512_pixel_image_equals_pillow_under_every_operation():
    generator = np.random.default_rng(5)
    for name, operation in pillow_pipeline.OPERATIONS.items():
        image = sample_images(1, 3, 512, 510, generator)
        value = torch.from_numpy(value_samples(name, 1, generator))
        expected = from_pillow([operation(to_pillow(image)[0], value.item())])
        assert torch.equal(apply_operation(name, image, value), expected), name


def test_mixed_sequences_equal_pillow_image_by_image():
    generator = np.random.default_rng(7)
    names = sorted(pillow_pipeline.OPERATIONS)
    for channels, height, width in [(3, 32, 32), (1, 20, 33)]:
        images = sample_images(600, channels, height, width, generator)
        chosen = generator.choice(names, (600, 3))
        values = np.array([[value_samples(name, 1, generator)[0] for name in row] for row in chosen])
        kinds = torch.tensor([[OPERATION_NAMES.index(name) for name in row] for row in chosen.tolist()])
        expected = to_pillow(images)
        for step in range(3):
            expected = [
                pillow_pipeline.OPERATIONS[name](picture, value)
                for picture, name, value in zip(expected, chosen[:, step].tolist(), values[:, step].tolist(), strict=True)
            ]
        assert torch.equal(apply_sequence(images, kinds, torch.from_numpy(values)), from_pillow(expected))


def random_size(generator):
    """Sides from 8 to 97, small ones more often."""
    return [int(8 * (98 / 8) ** share) for share in generator.random(2)]


def value_samples(name, count, generator):
    """Values over the whole range, its ends and middle, and the paper's narrower range."""
    operation = OPERATIONS[name]
    values = generator.uniform(operation.low, operation.high, count)
    middle = 1.0 if operation.unit == "factor" else (operation.low + operation.high) / 2
    values[:4] = [operation.low, operation.high, middle, round(values[-1])][:count]
    if name == "rotate":
        values[count // 2 :] = generator.uniform(-30, 30, count - count // 2)
        values[4:10] = [90, 180, 270, -90, 45, -30][: max(min(count - 4, 6), 0)]
    elif operation.signed:
        values[count // 2 :] = generator.uniform(-0.3, 0.3, count - count // 2)
    return np.clip(values, operation.low, operation.high)
