"""Deep label propagation from its paper in dense NumPy and plain loops; imports nothing of the package."""

from __future__ import annotations

import math

import numpy as np


def affinity(features, neighbors, power):
    """A: (N, N), row i holds max(0, v_i . v_j)^power for its `neighbors` most similar others."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    matrix = np.zeros((len(unit), len(unit)))
    for i in range(len(unit)):
        others = [(float(unit[i] @ unit[j]), j) for j in range(len(unit)) if j != i]
        for similarity, j in sorted(others, reverse=True)[:neighbors]:
            matrix[i, j] = max(0.0, similarity) ** power
    return matrix


def diffused(directed, labels, classes, alpha):
    """Z: the exact solution of (I - alpha S) Z = Y, columns y_c = 1 / |L_c| on the labeled members of c."""
    mutual = directed + directed.T
    degrees = mutual.sum(axis=1)
    degrees[degrees == 0] = 1
    normalized = mutual / np.sqrt(np.outer(degrees, degrees))
    sources = np.zeros((len(labels), classes))
    for i, label in enumerate(labels):
        if label >= 0:
            sources[i, label] = 1 / sum(other == label for other in labels)
    return np.linalg.solve(np.eye(len(labels)) - alpha * normalized, sources)


def propagated_labels(solution, labels):
    """yhat, omega and zeta from Z, image by image."""
    images, classes = solution.shape
    predicted, certainty = [], []
    for row in solution:
        shares = [max(0.0, value) for value in row]
        total = sum(shares)
        shares = [share / total for share in shares] if total else [1 / classes] * classes
        entropy = -sum(share * math.log(share) for share in shares if share > 0)
        predicted.append(int(np.argmax(shares)))
        certainty.append(max(0.0, 1 - entropy / math.log(classes)))
    largest = max(certainty)
    certainty = [value / largest for value in certainty] if largest else certainty
    for i, label in enumerate(labels):
        if label >= 0:
            predicted[i], certainty[i] = int(label), 1.0
    weights = [images / classes / max(1, predicted.count(label)) for label in range(classes)]
    return predicted, certainty, weights


def loss_terms(labeled_logits, labels, unlabeled_logits, predicted, certainty, weights):
    """(1/B) sum_i omega_i zeta CE, its labeled and its unlabeled images apart."""

    def cross_entropy(logits, label):
        return math.log(sum(math.exp(value - logits[label]) for value in logits))

    images = len(labels) + len(predicted)
    supervised = sum(weights[y] * cross_entropy(logits, y) for logits, y in zip(labeled_logits, labels, strict=True))
    pseudo_label = sum(
        omega * weights[y] * cross_entropy(logits, y)
        for logits, y, omega in zip(unlabeled_logits, predicted, certainty, strict=True)
    )
    return supervised / images, pseudo_label / images
