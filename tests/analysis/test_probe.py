"""The probe: torchvision's transformations pixel by pixel, the SVM against a loop, and both ends of its scale."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import Command, Trained
from crmatch.analysis import probe
from crmatch.analysis.probe import TRANSFORMATIONS, probe_task
from crmatch.runs.workspace import Workspace


def noise(count: int, channels: int = 3, height: int = 20, width: int = 16) -> torch.Tensor:
    shape, random = (count, channels, height, width), torch.Generator().manual_seed(0)
    return torch.randint(40, 256, shape, dtype=torch.uint8, generator=random)


def affine(image: torch.Tensor, angle: float, move: tuple[int, int], scale: float) -> np.ndarray:
    """torchvision's affine on one Pillow image, as its `_get_inverse_affine_matrix` writes it, without shear."""
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    x, y = picture.width * 0.5, picture.height * 0.5
    rotation = math.radians(angle)
    a, b = math.cos(rotation) / scale, math.sin(rotation) / scale
    matrix = [a, b, 0.0, -b, a, 0.0]
    matrix[2] += matrix[0] * (-x - move[0]) + matrix[1] * (-y - move[1]) + x
    matrix[5] += matrix[3] * (-x - move[0]) + matrix[4] * (-y - move[1]) + y
    return np.asarray(picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST))


def test_translations_are_torchvisions_whole_pixel_moves() -> None:
    images = noise(200)
    moved = TRANSFORMATIONS["translation"](images, torch.Generator().manual_seed(3))
    draws = torch.rand(400, generator=torch.Generator().manual_seed(3), dtype=torch.float64).view(-1, 2) * 2 - 1
    seen = set()
    for image, result, (across, down) in zip(images, moved, draws.tolist(), strict=True):
        move = round(across * 0.3 * 16), round(down * 0.3 * 20)
        seen.add(move)
        assert np.array_equal(result.permute(1, 2, 0).numpy(), affine(image, 0, move, 1))
    assert {move[0] for move in seen} == set(range(-5, 6))
    assert {move[1] for move in seen} == set(range(-6, 7))


def test_scalings_and_rotations_equal_pillow() -> None:
    images = noise(60, height=18, width=18)
    uniform = torch.rand(60, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    scaled, turned = (TRANSFORMATIONS[name](images, torch.Generator().manual_seed(5)) for name in ("scaling", "rotation"))
    for row, value in enumerate(uniform.tolist()):
        assert np.array_equal(scaled[row].permute(1, 2, 0).numpy(), affine(images[row], 0, (0, 0), 0.5 + 0.4 * value))
        picture = Image.fromarray(images[row].permute(1, 2, 0).numpy())
        assert np.array_equal(turned[row].permute(1, 2, 0).numpy(), np.asarray(picture.rotate(-30 + 60 * value)))


def test_the_svm_follows_a_loop_over_single_samples() -> None:
    random = np.random.default_rng(0)
    features, classes = random.normal(size=(150, 5)), random.choice([-1.0, 1.0], 150)

    def generator(epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(epoch)

    found, found_bias = probe.train_svm(lambda epoch: (features + epoch, classes), generator, epochs=4)
    weights, bias, speed, bias_speed, step = np.zeros(5), 0.0, np.zeros(5), 0.0, 0
    for epoch in range(4):
        order = torch.randperm(150, generator=generator(epoch)).tolist()
        for batch in (order[:64], order[64:128], order[128:]):
            gradient, bias_gradient = 1e-4 * weights, 0.0
            for row in batch:
                if classes[row] * ((features[row] + epoch) @ weights + bias) < 1:
                    gradient = gradient - classes[row] * (features[row] + epoch) / len(batch)
                    bias_gradient -= classes[row] / len(batch)
            speed, bias_speed = 0.9 * speed + gradient, 0.9 * bias_speed + bias_gradient
            rate = 0.001 * (1 + math.cos(math.pi * step / 12)) / 2
            weights, bias, step = weights - rate * speed, bias - rate * bias_speed, step + 1
    assert found == pytest.approx(weights, rel=1e-12)
    assert found_bias == pytest.approx(bias, rel=1e-12)


def test_the_error_counts_samples_on_the_wrong_side() -> None:
    features, classes = np.array([[2.0, 0], [0, 0], [3, 9], [1, 0]]), np.array([1.0, -1.0, -1.0, 1.0])
    assert probe.svm_error(np.array([1.0, 0.0]), -1.0, features, classes) == 50.0


def test_the_error_is_near_0_for_features_that_show_a_scaling_and_near_50_for_others() -> None:
    images = noise(2000, channels=1, height=16)
    task = (probe._unchanged, TRANSFORMATIONS["scaling"])

    def frame(part: torch.Tensor) -> torch.Tensor:
        """Scaling below 1 blackens the first row."""
        return part[:, 0, 0].float()

    def blind(part: torch.Tensor) -> torch.Tensor:
        """Features that do not depend on the images."""
        return torch.randn(len(part), 6, generator=torch.Generator().manual_seed(int(part.sum())))

    kept, hidden = (probe_task("scaling", task, images, features, repeats=1) for features in (frame, blind))
    assert kept.mean < 1
    assert 42 < hidden.mean < 58
    assert (kept.n, hidden.n) == (1, 1)


def test_every_epoch_has_new_draws_and_repeats_have_their_own_splits() -> None:
    images = noise(50, channels=1, height=8, width=8)
    seen: list[int] = []

    def features(part: torch.Tensor) -> torch.Tensor:
        seen.append(int(part.sum()))
        return part.flatten(1).float()

    probe_task("rotation", (probe._unchanged, TRANSFORMATIONS["rotation"]), images, features, repeats=2)
    assert len(seen) == 2 * (1 + probe.EPOCHS + 2)  # plain once, transformed in every epoch, two for the error
    assert len(set(seen)) > 2 * probe.EPOCHS


def test_a_fifth_of_a_small_test_set_trains() -> None:
    assert [probe.training_images(count) for count in (10_000, 2000, 1999, 500)] == [1000, 1000, 399, 100]


def test_the_command_measures_all_five_and_repeats_to_the_digit(crmatch: Command, trained: Trained) -> None:
    run, data_dir = trained
    outcome = crmatch("probe", run, "--data-dir", data_dir, "--repeats", 1, "--json")
    assert outcome.code == 0, outcome.err
    answer = json.loads(outcome.out)
    assert list(answer) == ["run", *TRANSFORMATIONS, probe.STRONG_AGAINST_WEAK]
    steps: list[tuple[int, int]] = []
    again = probe.probe(
        run, Workspace.at(data_dir=data_dir), repeats=1, progress=lambda done, total: steps.append((done, total))
    )
    assert steps == [(done, 5) for done in range(5)]
    assert {name: summary._asdict() for name, summary in again.items()} == {k: v for k, v in answer.items() if k != "run"}
    assert all(0 <= summary.mean <= 100 and summary.n == 1 for summary in again.values())
    assert crmatch("probe", run, "--repeats", 0).code == 2
