"""The graph and the linear systems of label propagation against dense and independent ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

from crmatch.methods import propagation
from crmatch.methods.propagation import affinity, normalized_graph, propagate, solve
from reference import label_propagation as reference

CLASSES = 5


@pytest.fixture(scope="module")
def points():
    """300 points in 5 overlapping groups, of which 20 are labeled, and all have a few negative similarities."""
    random = np.random.default_rng(0)
    groups = np.arange(300) % CLASSES
    features = random.normal(size=(CLASSES, 16))[groups] + random.normal(size=(300, 16))
    labels = np.where(np.arange(300) < 20, groups, -1)
    return torch.from_numpy(features), torch.from_numpy(labels)


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_the_graph_is_the_same_in_blocks_of_any_size(points, monkeypatch, rows):
    features = torch.nn.functional.normalize(points[0], dim=1)
    whole = affinity(features, 10, 3.0).toarray()
    monkeypatch.setattr(propagation, "ROWS_PER_BLOCK", rows)
    np.testing.assert_allclose(affinity(features, 10, 3.0).toarray(), whole, atol=1e-12)
    np.testing.assert_allclose(whole, reference.affinity(points[0].numpy(), 10, 3.0), atol=1e-12)


def test_with_many_iterations_the_solution_is_that_of_the_dense_system(points):
    features, labels = points
    directed = affinity(torch.nn.functional.normalize(features, dim=1), 50, 3.0)
    sources = propagation.label_sources(labels.numpy(), CLASSES)
    found = solve(normalized_graph(directed), sources, 0.99, 1000, 1e-12)
    expected = reference.diffused(reference.affinity(features.numpy(), 50, 3.0), labels.tolist(), CLASSES, 0.99)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_with_20_iterations_each_class_equals_scipys_own_conjugate_gradients(points):
    features, labels = points
    graph = normalized_graph(affinity(torch.nn.functional.normalize(features, dim=1), 50, 3.0))
    sources = propagation.label_sources(labels.numpy(), CLASSES)
    found = solve(graph, sources, 0.99, 20, 1e-6)
    system = sparse.eye_array(300) - 0.99 * graph
    for label in range(CLASSES):
        expected, _ = sparse.linalg.cg(system, sources[:, label], rtol=1e-6, maxiter=20)
        np.testing.assert_allclose(found[:, label], expected, atol=1e-10)


def test_labels_certainties_and_class_weights_equal_the_loop(points):
    features, labels = points
    found = propagate(features, labels, CLASSES, iterations=1000, tolerance=1e-12)
    solution = reference.diffused(reference.affinity(features.numpy(), 50, 3.0), labels.tolist(), CLASSES, 0.99)
    predicted, certainty, weights = reference.propagated_labels(solution, labels.tolist())
    assert found.labels.tolist() == predicted
    np.testing.assert_allclose(found.certainty.numpy(), certainty, atol=1e-5)
    np.testing.assert_allclose(found.class_weights.numpy(), weights, atol=1e-12)
    assert 0 <= float(found.certainty.min()) < float(found.certainty.max()) == 1
    assert torch.equal(found.labels[labels >= 0], labels[labels >= 0])
    assert bool((found.certainty[labels >= 0] == 1).all())


def test_an_image_without_similar_ones_is_uncertain_and_harms_nothing():
    features = torch.eye(6, 4)
    features[4:] = torch.tensor([-1.0, -1, -1, -1])
    features[5] = -features[4]
    labels = torch.tensor([0, 1, -1, -1, -1, -1])
    found = propagate(torch.cat([features, -features[:1]]), torch.cat([labels, torch.tensor([-1])]), 2, neighbors=1)
    assert bool(torch.isfinite(found.certainty).all())
    assert found.certainty[4] == 0
    assert found.certainty[:2].tolist() == [1, 1]


def test_fewer_images_than_neighbors_make_a_complete_graph():
    features = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    found = propagate(features, torch.tensor([0, 1, -1, -1]), 2, neighbors=50)
    assert found.labels.shape == (4,)
    assert affinity(features, 50, 3.0).nnz == 12


def test_a_class_without_labels_gets_no_image_and_the_largest_weight(points):
    features, labels = points
    found = propagate(features, torch.where(labels == 4, -1, labels), CLASSES)
    assert not bool((found.labels == 4).any())
    assert found.class_weights[4] == 300 / CLASSES
