"""Every operation equals Pillow's result in every pixel, on more than 10,000 images each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sample_images import from_pillow, sample_images, to_pillow

from conftest import QUICK
from crmatch.augment.operations import OPERATION_NAMES, OPERATIONS, apply_operation, apply_sequence
from reference import pillow_pipeline

BATCH = 75 if QUICK else 200
BATCHES = 8 if QUICK else 50
FIXED_SIZES = [(8, 8), (8, 97), (97, 8), (97, 97), (32, 32), (9, 15), (96, 96), (16, 45)]


def by_pillow(images, names, values):
    """Each image through its own operation, one after the other."""
    rows = zip(to_pillow(images), names, values.tolist(), strict=True)
    return from_pillow([pillow_pipeline.OPERATIONS[name](picture, value) for picture, name, value in rows])


def test_operations_with_the_same_kernel_stand_together_so_that_they_are_one_pass():
    kernels = [operation.kernel for operation in OPERATIONS.values()]
    assert sorted(kernels, key=list(dict.fromkeys(kernels)).index) == kernels


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_pillow_in_every_pixel(name):
    generator = np.random.default_rng([ord(letter) for letter in name])
    for number in range(BATCHES):
        height, width = FIXED_SIZES[number] if number < len(FIXED_SIZES) else random_size(generator)
        images = sample_images(BATCH, 1 if number % 3 == 2 else 3, height, width, generator)
        if number % 2:
            images = images.contiguous(memory_format=torch.channels_last)
        values = torch.from_numpy(value_samples(name, BATCH, generator))
        assert torch.equal(apply_operation(name, images, values), by_pillow(images, [name] * BATCH, values)), (height, width)


@pytest.mark.parametrize("name", ["translate_x", "translate_y", "shear_x", "shear_y", "rotate", "scale"])
def test_warps_equal_pillow_where_positions_fall_on_pixel_borders(name):
    low, high = OPERATIONS[name].low, OPERATIONS[name].high
    round_numbers = np.linspace(low, high, 401)
    steps = [math.nextafter(value, -math.inf) for value in round_numbers[1:]]
    values = torch.tensor([*round_numbers, *steps], dtype=torch.float64)
    for height, width in [(50, 50), (8, 25), (31, 64)]:
        images = sample_images(len(values), 1, height, width, np.random.default_rng(height))
        expected = by_pillow(images, [name] * len(values), values)
        assert torch.equal(apply_operation(name, images, values), expected), (height, width)


def test_a_512_pixel_image_equals_pillow_under_every_operation():
    generator = np.random.default_rng(5)
    for name in OPERATIONS:
        image = sample_images(1, 3, 512, 510, generator)
        value = torch.from_numpy(value_samples(name, 1, generator))
        assert torch.equal(apply_operation(name, image, value), by_pillow(image, [name], value)), name


def test_mixed_sequences_equal_pillow_image_by_image():
    generator = np.random.default_rng(7)
    for channels, height, width in [(3, 32, 32), (1, 20, 33)]:
        images = sample_images(600, channels, height, width, generator)
        chosen = generator.choice(OPERATION_NAMES, (600, 3))
        values = np.array([[value_samples(name, 1, generator)[0] for name in row] for row in chosen])
        kinds = torch.tensor([[OPERATION_NAMES.index(name) for name in row] for row in chosen.tolist()])
        expected = images
        for step in range(3):
            expected = by_pillow(expected, chosen[:, step].tolist(), values[:, step])
        assert torch.equal(apply_sequence(images, kinds, torch.from_numpy(values)), expected)


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
