"""Prototypes of classes (Kuo et al., ECCV 2020): the mean of a class's features and centroids of their clusters."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

KMEANS_ITERATIONS = 100
THRESHOLDS = 5
"""So many thresholds are tried, each half of the one before."""


class Prototypes(NamedTuple):
    """Prototypes of K classes, M places each.

    Attributes:
        features: (K * M, D), class after class; 0 where a place is empty.
        filled: bool (K * M,).
    """

    features: Tensor
    filled: Tensor


class Candidates(NamedTuple):
    """Features with the classes they are taken for: (N, D) and int64 (N,)."""

    features: Tensor
    classes: Tensor


def find_prototypes(
    labeled: Candidates, unlabeled: Candidates | None, classes: int, per_class: int, generator: torch.Generator
) -> Prototypes:
    """Up to `per_class` prototypes of each class: half of them from labeled features, the rest from unlabeled ones.

    Without unlabeled features all come from labeled ones. Where labeled features are too few for their half, unlabeled
    ones take the places.
    """
    width = labeled.features.shape[1]
    features = labeled.features.new_zeros(classes, per_class, width)
    filled = torch.zeros(classes, per_class, dtype=torch.bool)
    for label in range(classes):
        own = labeled.features[labeled.classes == label]
        found = class_prototypes(own, per_class if unlabeled is None else max(1, round(per_class / 2)), generator)
        if unlabeled is not None and len(found) < per_class:
            taken = unlabeled.features[unlabeled.classes == label]
            found = torch.cat([found, class_prototypes(taken, per_class - len(found), generator)])
        features[label, : len(found)] = found
        filled[label, : len(found)] = True
    return Prototypes(features.flatten(0, 1), filled.flatten())


def class_prototypes(features: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The mean and count - 1 centroids of (N, D) features, or all of them where they are no more than that.

    Clusters are found among features of length 1; a centroid is the mean of the features themselves.
    """
    if not len(features):
        return features
    mean = features.mean(dim=0, keepdim=True)
    clusters = count - 1
    if clusters == 0:
        return mean
    if clusters >= len(features):
        return torch.cat([mean, features])
    members = kmeans(F.normalize(features.double(), dim=1), clusters, generator)
    own = [features[members == cluster] for cluster in range(clusters)]
    return torch.cat([mean, *(part.mean(dim=0, keepdim=True) for part in own if len(part))])


def kmeans(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm from k-means++ centers: the cluster of each of (N, D) points, int64 (N,).

    The i-th center is the first point at which the running sum of squared distances to the nearest center so far exceeds
    a uniform share of its total; the first center is uniform. A cluster that loses all its points keeps its center.
    """
    shares = torch.rand(clusters, generator=generator, dtype=torch.float64)
    centers = points[: int(shares[0] * len(points)) + 1][-1:]
    for share in shares[1:]:
        running = _squared_distances(points, centers).amin(dim=1).cumsum(dim=0)
        place = int(torch.searchsorted(running, share * running[-1], right=True).clamp_max(len(points) - 1))
        centers = torch.cat([centers, points[place : place + 1]])
    members = _squared_distances(points, centers).argmin(dim=1)
    for _ in range(KMEANS_ITERATIONS):
        sums = torch.zeros_like(centers).index_add_(0, members, points)
        counts = members.bincount(minlength=clusters)[:, None]
        centers = torch.where(counts > 0, sums / counts.clamp_min(1), centers)
        renewed = _squared_distances(points, centers).argmin(dim=1)
        if torch.equal(renewed, members):
            break
        members = renewed
    return members


def confident_candidates(
    seen: Candidates, confidence: Tensor, classes: int, threshold: float, needed: int
) -> Candidates | None:
    """Those whose confidence (N,) exceeds the threshold, which is halved until each class has more than `needed`, or None."""
    for halvings in range(THRESHOLDS):
        chosen = confidence > threshold / 2**halvings
        if int(seen.classes[chosen].bincount(minlength=classes).min()) > needed:
            return Candidates(seen.features[chosen], seen.classes[chosen])
    return None


def _squared_distances(points: Tensor, centers: Tensor) -> Tensor:
    """(N, C) of (N, D) points and (C, D) centers."""
    return torch.cdist(points, centers, compute_mode="donot_use_mm_for_euclid_dist").square()
