"""Each formula equals the loop over images of `reference.crmatch_formulas`, at ordinary and at extreme values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from crmatch import losses
from reference import crmatch_formulas as reference

RELATIVE = 1e-10
DISTANCES = [
    (distance, direction, clamp)
    for distance in ("cosine", "l2", "squared_l2", "js")
    for direction in ("equivariance", "invariance")
    for clamp in (True, False)
    if (distance, direction) != ("squared_l2", "equivariance")
]
every_distance = pytest.mark.parametrize(("distance", "direction", "clamp"), DISTANCES)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def random_pairs(rows=40, width=7, seed=0):
    """Two groups of vectors at angles on both sides of 90 degrees, of lengths from 0.01 to 100."""
    random = np.random.default_rng(seed)
    lengths = 10.0 ** random.uniform(-2, 2, (2, rows, 1))
    first, second = random.normal(size=(2, rows, width)) * lengths
    return tensor(first), tensor(second)


def edge_pairs():
    """Zero, tiny, identical, opposite, orthogonal, parallel and huge vectors."""
    pairs = [
        ([0, 0, 0], [0, 0, 0]),
        ([0, 0, 0], [1, -2, 3]),
        ([1, -2, 3], [0, 0, 0]),
        ([1e-10, 0, 0], [1e-10, 1e-10, 0]),
        ([1e-13, 0, 0], [0, 1e-13, 0]),
        ([1, -2, 3], [1, -2, 3]),
        ([1, -2, 3], [-1, 2, -3]),
        ([1, 0, 0], [0, 1, 0]),
        ([1, -2, 3], [10, -20, 30]),
        ([1e4, 0, -1e4], [-1e4, 0, 1e4]),
        ([1e100, 0, 0], [1e100, 1e100, 0]),
    ]
    first, second = zip(*pairs, strict=True)
    return tensor(first), tensor(second)


def by_image(function, *groups):
    return tensor([function(*rows) for rows in zip(*(group.tolist() for group in groups), strict=True)])


def gradients(function, *inputs):
    leaves = [value.clone().requires_grad_() for value in inputs]
    return torch.autograd.grad(function(*leaves).sum(), leaves)


def test_cross_entropy_of_classes_equals_the_loop():
    random = np.random.default_rng(1)
    logits, labels = tensor(random.normal(size=(30, 5)) * 4), torch.tensor(random.integers(0, 5, 30))
    expected = by_image(reference.cross_entropy, labels, logits)
    torch.testing.assert_close(losses.cross_entropy(logits, labels), expected, rtol=RELATIVE, atol=0)


def test_cross_entropy_of_distributions_equals_the_loop():
    random = np.random.default_rng(2)
    logits, targets = tensor(random.normal(size=(30, 5)) * 4), tensor(random.dirichlet([0.3] * 5, 30))
    expected = by_image(reference.cross_entropy, targets, logits)
    torch.testing.assert_close(losses.cross_entropy(logits, targets), expected, rtol=RELATIVE, atol=0)


def test_cross_entropy_of_huge_logits_is_exact_and_has_a_finite_gradient():
    logits = tensor([[1e4, 0, -1e4], [-1e4, 0, 1e4], [1e4, 1e4, 1e4], [0, 0, 0]])
    labels = torch.zeros(4, dtype=torch.int64)
    expected = tensor([0, 2e4, math.log(3), math.log(3)])
    torch.testing.assert_close(losses.cross_entropy(logits, labels), expected, rtol=RELATIVE, atol=0)
    torch.testing.assert_close(by_image(reference.cross_entropy, labels, logits), expected, rtol=RELATIVE, atol=0)
    (gradient,) = gradients(lambda values: losses.cross_entropy(values, labels), logits)
    assert gradient.isfinite().all()


def test_masked_mean_divides_by_all_images_whatever_the_mask():
    values = tensor([1.0, 2.0, 4.0, 8.0])
    for mask, expected in [([1, 0, 1, 0], 5 / 4), ([0, 0, 0, 1], 8 / 4), ([1, 1, 1, 1], 15 / 4), ([0, 0, 0, 0], 0)]:
        assert losses.masked_mean(values, torch.tensor(mask, dtype=torch.bool)).item() == expected


def test_masked_mean_of_fractions_equals_the_loop():
    random = np.random.default_rng(4)
    values, mask = tensor(random.normal(size=20)), tensor(random.uniform(size=20))
    expected = sum(m * v for m, v in zip(mask.tolist(), values.tolist(), strict=True)) / 20
    assert losses.masked_mean(values, mask).item() == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("pairs", [random_pairs, edge_pairs])
def test_cosine_similarity_equals_the_loop(pairs):
    first, second = pairs()
    expected = by_image(reference.cosine, first, second)
    torch.testing.assert_close(losses.cosine_similarity(first, second), expected, rtol=RELATIVE, atol=1e-15)


def test_cosine_similarity_of_known_angles():
    first, second = tensor([[3, 4], [3, 4], [3, 4], [3, 4], [0, 0]]), tensor([[3, 4], [-6, -8], [-4, 3], [3, 0], [3, 4]])
    torch.testing.assert_close(losses.cosine_similarity(first, second), tensor([1, -1, 0, 0.6, 0]), rtol=0, atol=1e-15)


@every_distance
@pytest.mark.parametrize("pairs", [random_pairs, edge_pairs])
def test_feature_distance_matches_the_formula_image_by_image(distance, direction, clamp, pairs):
    first, second = pairs()
    expected = by_image(lambda a, b: reference.feature_distance(distance, direction, a, b, clamp), first, second)
    found = losses.feature_distance(first, second, distance, direction, clamp=clamp)
    torch.testing.assert_close(found, expected, rtol=RELATIVE, atol=1e-15)


@every_distance
def test_the_gradient_of_every_distance_is_that_of_the_formula(distance, direction, clamp):
    random = np.random.default_rng(5)
    first, second = tensor(random.normal(size=(12, 4))), tensor(random.normal(size=(12, 4)))
    found = gradients(lambda a, b: losses.feature_distance(a, b, distance, direction, clamp=clamp), first, second)
    step = 1e-6
    for position, side in enumerate((first, second)):
        for row in range(len(side)):
            for column in range(side.shape[1]):
                values = []
                for sign in (1, -1):
                    pair = [first[row].clone(), second[row].clone()]
                    pair[position][column] += sign * step
                    values.append(reference.feature_distance(distance, direction, *(v.tolist() for v in pair), clamp))
                slope = (values[0] - values[1]) / (2 * step)
                assert found[position][row, column].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_squared_l2_is_the_sum_over_dimensions_of_equation_1():
    found = losses.feature_distance(tensor([[1.0, 2, 3]]), tensor([[3.0, 2, 0]]), "squared_l2", "invariance")
    assert found.tolist() == [13.0]


def test_l2_and_its_similarity_have_the_ranges_of_the_specification():
    same, opposite = tensor([[3.0, 4]]), tensor([[-6.0, -8]])
    assert losses.feature_distance(same, same, "l2", "invariance").item() == pytest.approx(0, abs=2e-6)
    assert losses.feature_distance(same, opposite, "l2", "invariance").item() == pytest.approx(2)
    assert losses.feature_distance(same, same, "l2", "equivariance").item() == pytest.approx(1, abs=2e-6)
    assert losses.feature_distance(same, opposite, "l2", "equivariance").item() == pytest.approx(0, abs=1e-12)


def test_the_clamp_stops_pushing_beyond_90_degrees():
    first, second = random_pairs(rows=200)
    obtuse = losses.cosine_similarity(first, second) < 0
    assert 50 < obtuse.sum() < 150

    def distance(a, b):
        return losses.feature_distance(a, b, "cosine", "equivariance", clamp=True)

    assert (distance(first, second)[obtuse] == 0).all()
    assert (distance(first, second)[~obtuse] > 0).all()
    for gradient in gradients(distance, first, second):
        assert (gradient[obtuse] == 0).all()
        assert (gradient[~obtuse] != 0).any(dim=1).all()


def test_the_clamp_gives_no_gradient_at_exactly_90_degrees():
    first, second = tensor([[1.0, 0], [0, 0], [1, 1]]), tensor([[0.0, 1], [0, 1], [0, 0]])
    assert losses.cosine_similarity(first, second).tolist() == [0, 0, 0]
    for gradient in gradients(lambda a, b: losses.feature_distance(a, b, "cosine", "equivariance"), first, second):
        assert (gradient == 0).all()


def test_without_the_clamp_pushing_goes_on_to_180_degrees():
    first, second = tensor([[1.0, 0]]), tensor([[-1.0, 1]])
    value = losses.feature_distance(first, second, "cosine", "equivariance", clamp=False)
    assert value.item() == pytest.approx(-math.sqrt(0.5))
    for gradient in gradients(lambda a, b: losses.feature_distance(a, b, "cosine", "equivariance", clamp=False), first, second):
        assert (gradient != 0).any()


@every_distance
def test_identical_opposite_and_zero_vectors_have_finite_gradients(distance, direction, clamp):
    first, second = edge_pairs()
    for gradient in gradients(lambda a, b: losses.feature_distance(a, b, distance, direction, clamp=clamp), first, second):
        assert gradient.isfinite().all()


def test_identical_vectors_pull_nowhere_under_l2():
    first = random_pairs()[0]
    for gradient in gradients(lambda a, b: losses.feature_distance(a, b, "l2", "invariance"), first, first):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)


def test_squared_l2_cannot_be_pushed():
    first, second = random_pairs()
    for clamp in (True, False):
        with pytest.raises(ValueError, match=r"squared_l2.*use invariance"):
            losses.feature_distance(first, second, "squared_l2", "equivariance", clamp=clamp)


@pytest.mark.parametrize("pairs", [random_pairs, edge_pairs])
def test_jensen_shannon_equals_the_loop(pairs):
    first, second = pairs()
    expected = by_image(reference.jensen_shannon, first, second)
    torch.testing.assert_close(losses.jensen_shannon(first, second), expected, rtol=RELATIVE, atol=1e-15)


@pytest.mark.parametrize("images", [1, 5])
def test_rotation_loss_equals_the_loop_over_four_blocks(images):
    logits = tensor(np.random.default_rng(6).normal(size=(4 * images, 4)) * 3)
    expected = reference.rotation_loss(logits.view(4, images, 4).tolist())
    assert losses.rotation_loss(logits).item() == pytest.approx(expected, rel=RELATIVE)


def test_rotation_labels_are_0_to_3_in_consecutive_blocks():
    right = torch.eye(4, dtype=torch.float64).repeat_interleave(3, dim=0) * 1e4
    assert losses.rotation_loss(right).item() == 0
    interleaved = torch.eye(4, dtype=torch.float64).repeat(3, 1) * 1e4
    assert losses.rotation_loss(interleaved).item() > 1e3


def test_losses_keep_the_precision_of_their_inputs():
    first, second = (value.float() for value in random_pairs())
    assert losses.masked_mean(first[:, 0], first[:, 0] > 0).dtype == torch.float32
    assert losses.rotation_loss(first[:, :4]).dtype == torch.float32
    for distance, direction, clamp in DISTANCES:
        assert losses.feature_distance(first, second, distance, direction, clamp=clamp).dtype == torch.float32
