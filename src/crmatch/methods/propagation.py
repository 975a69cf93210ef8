"""Label propagation on a nearest-neighbor graph (Iscen et al., CVPR 2019): from features and some labels to all labels."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from scipy import sparse, special
from torch import Tensor

Floats = NDArray[np.float64]
ROWS_PER_BLOCK = 512
"""Rows of the similarity matrix in memory at a time: 100 MB for 50,000 images."""
COLUMNS_PER_BLOCK = 16
"""Classes solved for together: their values for one image fill two cache lines."""


class Propagated(NamedTuple):
    """Labels of all N images.

    Attributes:
        labels: int64 (N,), the true class of labeled images, the propagated class of all others.
        certainty: float64 (N,), omega in 0..1; 1 for labeled images.
        class_weights: float64 (K,), zeta.
    """

    labels: Tensor
    certainty: Tensor
    class_weights: Tensor


def propagate(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    neighbors: int = 50,
    power: float = 3.0,
    alpha: float = 0.99,
    iterations: int = 20,
    tolerance: float = 1e-6,
) -> Propagated:
    """Propagate the labels of the labeled images to all others.

    Args:
        features: (N, D), of any length.
        labels: int64 (N,), the class of labeled images, -1 for all others.
        classes: K.
        neighbors: k of the graph.
        power: gamma, the exponent of the similarities.
        alpha: how much of a label comes from the neighbors.
        iterations: of conjugate gradients, at most.
        tolerance: relative residual at which conjugate gradients stop.
    """
    known = labels.cpu().numpy()
    graph = normalized_graph(affinity(F.normalize(features, dim=1), neighbors, power))
    sources = label_sources(known, classes)
    blocks = [sources[:, first : first + COLUMNS_PER_BLOCK] for first in range(0, classes, COLUMNS_PER_BLOCK)]
    solution = np.concatenate([solve(graph, block, alpha, iterations, tolerance) for block in blocks], axis=1)

    # zhat (N, K): positive part of Z, rows divided by their sum; uniform for images that no label has reached
    positive = np.maximum(solution, 0.0)
    total = positive.sum(axis=1, keepdims=True)
    shares: Floats = np.full_like(positive, 1 / classes)
    np.divide(positive, total, out=shares, where=total > 0)

    # yhat_i = argmax_k zhat_ik, omega_i = 1 - H(zhat_i) / log K divided by its maximum
    certainty = np.clip(1 - special.entr(shares).sum(axis=1) / math.log(classes), 0.0, 1.0)
    certainty = np.where(known >= 0, 1.0, certainty / (certainty.max() or 1.0))
    predicted = np.where(known >= 0, known, shares.argmax(axis=1))

    # zeta_k = (N / K) / max(1, |{i: yhat_i = k}|)
    class_weights = len(known) / classes / np.maximum(np.bincount(predicted, minlength=classes), 1)
    return Propagated(torch.from_numpy(predicted), torch.from_numpy(certainty), torch.from_numpy(class_weights))


def affinity(features: Tensor, neighbors: int, power: float) -> sparse.csr_array:
    """A_ij = max(0, v_i . v_j)^power for the exact nearest neighbors j of i, as a sparse (N, N) matrix.

    Args:
        features: (N, D), v, of length 1.
        neighbors: k; all other images if there are fewer.
        power: gamma.
    """
    images = len(features)
    count = min(neighbors, images - 1)
    values, columns = np.empty((images, count)), np.empty((images, count), dtype=np.int32)
    for first in range(0, images, ROWS_PER_BLOCK):
        rows = torch.arange(first, min(first + ROWS_PER_BLOCK, images), device=features.device)
        similarity = features[rows] @ features.T
        similarity[rows - first, rows] = -torch.inf  # an image is not its own neighbor
        nearest = similarity.topk(count, dim=1)
        block = slice(first, first + len(rows))
        values[block] = nearest.values.clamp_min(0).cpu().double().pow(power).numpy()
        columns[block] = nearest.indices.cpu().numpy()
    starts = np.arange(images + 1, dtype=np.int64) * count
    return sparse.csr_array((values.reshape(-1), columns.reshape(-1), starts), shape=(images, images))


def normalized_graph(directed: sparse.csr_array) -> sparse.csr_array:
    """S = D^-1/2 W D^-1/2 with W = A + A^T and D the degrees of W; a degree of 0 is replaced by 1."""
    graph = sparse.csr_array(directed + directed.T)
    degrees = np.asarray(graph.sum(axis=1)).reshape(-1)
    scale = 1 / np.sqrt(np.where(degrees > 0, degrees, 1.0))
    graph.data *= np.repeat(scale, np.diff(graph.indptr)) * scale[graph.indices]
    return graph


def label_sources(labels: NDArray[np.int64], classes: int) -> Floats:
    """Y (N, K): y_ik = 1 / |L_k| for the labeled images L_k of class k, else 0."""
    onehot = labels[:, None] == np.arange(classes)
    sources: Floats = onehot / np.maximum(onehot.sum(axis=0), 1)
    return sources


def solve(graph: sparse.csr_array, sources: Floats, alpha: float, iterations: int, tolerance: float) -> Floats:
    """Z with (I - alpha S) z_k = y_k for each column k, by conjugate gradients from 0.

    The columns are independent: each has its own step lengths, and stops when |r_k| <= tolerance * |y_k| or after `iterations`
    steps. They are solved together because they share the multiplications with the graph.
    """
    solution, residual = np.zeros_like(sources), sources.copy()
    direction = residual.copy()
    squared = np.einsum("nk,nk->k", residual, residual)  # |r_k|^2
    smallest = tolerance**2 * squared
    for _ in range(iterations):
        active = squared > smallest
        if not active.any():
            break
        image = direction - alpha * (graph @ direction)
        curvature = np.einsum("nk,nk->k", direction, image)
        length = np.divide(squared, curvature, out=np.zeros_like(squared), where=active)
        solution += length * direction
        residual -= length * image
        renewed = np.where(active, np.einsum("nk,nk->k", residual, residual), squared)
        direction *= np.divide(renewed, squared, out=np.zeros_like(squared), where=active)
        direction += residual
        squared = renewed
    return solution
