"""Label propagation on a nearest-neighbor graph (Iscen et al., CVPR 2019): features and some labels in, all labels out.

The graph's rows are made block by block, and the classes are solved for independently of one another, so both can be
shared among processes: `neighbors_of` takes any block of rows, `solve` any columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

Floats = NDArray[np.float64]
ROWS_PER_BLOCK = 512
"""Rows of the similarity matrix held at a time: 100 MB for 50,000 images."""
COLUMNS_PER_BLOCK = 16
"""Classes solved for together: their values of one image fill two cache lines."""


class Propagated(NamedTuple):
    """What N images are believed to be.

    Attributes:
        labels: int64 (N,), yhat; the true class of labeled images.
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
    """Labels, certainties and class weights of all images from those that are labeled.

    yhat_i = argmax_c zhat_ic, omega_i = 1 - H(zhat_i) / log K divided by its largest value, and
    zeta_c = (N / K) / max(1, |{i: yhat_i = c}|), where zhat are the rows of the diffused labels, each summing to 1.

    Args:
        features: (N, D), of any length.
        labels: int64 (N,), the class of labeled images, -1 for all others.
        classes: K.
        neighbors: k of the graph.
        power: gamma, to which similarities are raised.
        alpha: how much of a label comes from the neighbors.
        iterations: of conjugate gradients, at most.
        tolerance: of the relative residual at which they stop.
    """
    known = labels.cpu().numpy()
    graph = normalized_graph(affinity(F.normalize(features, dim=1), neighbors, power))
    sources = label_sources(known, classes)
    columns = [
        solve(graph, sources[:, first : first + COLUMNS_PER_BLOCK], alpha, iterations, tolerance)
        for first in range(0, classes, COLUMNS_PER_BLOCK)
    ]
    shares = row_shares(np.concatenate(columns, axis=1))
    labeled = known >= 0
    predicted = np.where(labeled, known, shares.argmax(axis=1))
    certain = np.where(labeled, 1.0, certainty(shares))
    members = np.bincount(predicted, minlength=classes)
    weights = len(known) / classes / np.maximum(members, 1)
    return Propagated(torch.from_numpy(predicted), torch.from_numpy(certain), torch.from_numpy(weights))


def neighbors_of(features: Tensor, first: int, last: int, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most similar other images of rows first..last-1, by inner product: similarities and rows, (n, count)."""
    similarity = features[first:last] @ features.T
    own = torch.arange(first, last, device=features.device)
    similarity[own - first, own] = -torch.inf
    nearest = similarity.topk(count, dim=1)
    return nearest.values, nearest.indices


def affinity(features: Tensor, neighbors: int, power: float) -> sparse.csr_array:
    """A_ij = max(0, v_i . v_j)^power for the nearest neighbors j of i, exact, as a sparse (N, N) matrix.

    Args:
        features: (N, D), v, of length 1.
        neighbors: k; all others where there are fewer.
        power: gamma.
    """
    images = len(features)
    count = min(neighbors, images - 1)
    values, columns = np.empty((images, count)), np.empty((images, count), dtype=np.int32)
    for first in range(0, images, ROWS_PER_BLOCK):
        last = min(first + ROWS_PER_BLOCK, images)
        similarity, nearest = neighbors_of(features, first, last, count)
        values[first:last] = similarity.clamp_min(0).double().pow(power).cpu().numpy()
        columns[first:last] = nearest.cpu().numpy()
    starts = np.arange(images + 1, dtype=np.int64) * count
    return sparse.csr_array((values.reshape(-1), columns.reshape(-1), starts), shape=(images, images))


def normalized_graph(directed: sparse.csr_array) -> sparse.csr_array:
    """S = D^-1/2 W D^-1/2 with W = A + A^T and D the degrees of W; a degree of 0 counts as 1."""
    mutual = sparse.csr_array(directed + directed.T)
    degrees = np.asarray(mutual.sum(axis=1)).reshape(-1)
    scale = 1 / np.sqrt(np.where(degrees > 0, degrees, 1.0))
    rows = np.repeat(np.arange(len(scale)), np.diff(mutual.indptr))
    mutual.data *= scale[rows] * scale[mutual.indices]
    return mutual


def label_sources(labels: NDArray[np.int64], classes: int) -> Floats:
    """Y (N, K): y_ic = 1 / |L_c| for the labeled images of class c, else 0."""
    sources = np.zeros((len(labels), classes))
    labeled = np.flatnonzero(labels >= 0)
    members = np.bincount(labels[labeled], minlength=classes)
    sources[labeled, labels[labeled]] = 1 / members[labels[labeled]]
    return sources


def solve(graph: sparse.csr_array, sources: Floats, alpha: float, iterations: int, tolerance: float) -> Floats:
    """Z with (I - alpha S) z_c = y_c for each column c, by conjugate gradients from 0.

    Each column has step lengths of its own and stops by itself, where |r_c| <= tolerance * |y_c| or after `iterations`
    steps; they only share the passes over the graph.
    """
    solution, residual = np.zeros_like(sources), sources.copy()
    direction = residual.copy()
    squared = np.einsum("nc,nc->c", residual, residual)
    smallest = tolerance**2 * squared
    for _ in range(iterations):
        active = squared > smallest
        if not active.any():
            break
        image = direction - alpha * (graph @ direction)
        curvature = np.einsum("nc,nc->c", direction, image)
        length = np.divide(squared, curvature, out=np.zeros_like(squared), where=active)
        solution += length * direction
        residual -= length * image
        renewed = np.where(active, np.einsum("nc,nc->c", residual, residual), squared)
        direction *= np.divide(renewed, squared, out=np.zeros_like(squared), where=active)
        direction += residual
        squared = renewed
    return solution


def row_shares(solution: Floats) -> Floats:
    """zhat: rows of Z without negative values, divided by their sum; uniform where nothing arrived."""
    positive = np.maximum(solution, 0.0)
    total = positive.sum(axis=1, keepdims=True)
    shares: Floats = np.full_like(positive, 1 / positive.shape[1])
    np.divide(positive, total, out=shares, where=total > 0)
    return shares


def certainty(shares: Floats) -> Floats:
    """omega_i = 1 - H(zhat_i) / log K, divided by the largest of them: (N, K) -> (N,) in 0..1."""
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy = -(shares * logs).sum(axis=1)
    certain: Floats = np.clip(1 - entropy / math.log(shares.shape[1]), 0.0, 1.0)
    return certain / (certain.max() or 1.0)
