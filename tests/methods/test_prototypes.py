"""Prototypes equal loops over classes, points and centers that get the same uniform numbers."""

from __future__ import annotations

import pytest
import torch

from crmatch.methods.prototypes import Candidates, class_prototypes, confident_candidates, find_prototypes, kmeans
from reference import featmatch_formulas as reference


def points(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def draw(count: int, source: torch.Generator) -> list[float]:
    return torch.rand(count, generator=source, dtype=torch.float64).tolist()


@pytest.mark.parametrize("clusters", [1, 4, 9])
def test_clusters_equal_the_loop(clusters: int) -> None:
    found = kmeans(points(40), clusters, generator())
    assert found.tolist() == reference.kmeans(points(40).tolist(), draw(clusters, generator()))


def test_clusters_of_equal_points_are_one() -> None:
    assert len(set(kmeans(torch.ones(10, 6, dtype=torch.float64), 4, generator()).tolist())) == 1
    assert len(class_prototypes(torch.ones(10, 6), 5, generator())) == 2


@pytest.mark.parametrize(("images", "count"), [(30, 10), (10, 10), (9, 10), (3, 10), (5, 1), (5, 2)])
def test_prototypes_of_a_class_equal_the_loop(images: int, count: int) -> None:
    source = generator()
    expected = reference.class_prototypes(points(images).tolist(), count, lambda number: draw(number, source))
    found = class_prototypes(points(images), count, generator())
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert len(found) <= count


@pytest.mark.parametrize("with_unlabeled", [True, False])
def test_labeled_features_give_half_and_unlabeled_ones_the_rest(with_unlabeled: bool) -> None:
    labeled = Candidates(points(17), torch.tensor([0] * 3 + [1] * 14))
    unlabeled = Candidates(points(60, seed=1), torch.arange(60) % 3) if with_unlabeled else None
    features, filled = find_prototypes(labeled, unlabeled, 3, 8, generator())
    source = generator()
    rows = features.reshape(3, 8, 6), filled.reshape(3, 8)
    for label in range(3):
        own = labeled.features[labeled.classes == label].tolist()
        half = 4 if unlabeled else 8
        expected = reference.class_prototypes(own, half, lambda number: draw(number, source)) if own else []
        if unlabeled:
            taken = unlabeled.features[unlabeled.classes == label].tolist()
            expected += reference.class_prototypes(taken, 8 - len(expected), lambda number: draw(number, source))
        torch.testing.assert_close(rows[0][label, : len(expected)].tolist(), expected)
        assert rows[1][label].tolist() == [True] * len(expected) + [False] * (8 - len(expected))


@pytest.mark.parametrize("needed", [1, 3, 8, 12, 30])
def test_the_threshold_is_halved_until_every_class_has_enough(needed: int) -> None:
    random = torch.Generator().manual_seed(0)
    seen = Candidates(points(60), torch.arange(60) % 3)
    confidence = torch.rand(60, generator=random) ** 2
    found = confident_candidates(seen, confidence, 3, 0.5, needed)
    expected = reference.confident(seen.classes.tolist(), confidence.tolist(), 3, 0.5, needed)
    assert (found is None) == (expected is None) == (needed == 30)
    if found is not None:
        assert torch.equal(found.features, seen.features[expected])
        assert torch.equal(found.classes, seen.classes[expected])


def test_images_never_seen_are_no_candidates() -> None:
    seen = Candidates(points(6), torch.arange(6) % 2)
    assert confident_candidates(seen, torch.zeros(6), 2, 0.5, 0) is None
