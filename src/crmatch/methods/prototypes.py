"""Prototypes of classes (Kuo et al., ECCV 2020): the mean of a class's features, and the centroids of their clusters."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

KMEANS_ITERATIONS = 100
THRESHOLDS = 5
"""Number of confidence thresholds that are tried, each half of the one before."""


class Candidates(NamedTuple):
    """Features (N, D), and their true or predicted classes, int64 (N,)."""

    features: Tensor
    classes: Tensor


def find_prototypes(
    labeled: Candidates, unlabeled: Candidates | None, classes: int, per_class: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Up to M = `per_class` prototypes of each class: half from labeled features, the rest from unlabeled ones.

    Without unlabeled features, all come from labeled ones. If labeled features do not fill their half, unlabeled ones do.

    Returns:
        Prototypes (K * M, D), class after class, and a bool mask (K * M,) of the rows that are filled; all others are 0.
    """
    features = labeled.features.new_zeros(classes, per_class, labeled.features.shape[1])
    filled = torch.zeros(classes, per_class, dtype=torch.bool)
    for label in range(classes):
        own = labeled.features[labeled.classes == label]
        found = class_prototypes(own, per_class if unlabeled is None else max(1, round(per_class / 2)), generator)
        if unlabeled is not None and len(found) < per_class:
            taken = unlabeled.features[unlabeled.classes == label]
            found = torch.cat([found, class_prototypes(taken, per_class - len(found), generator)])
        features[label, : len(found)] = found
        filled[label, : len(found)] = True
    return features.flatten(0, 1), filled.flatten()


def class_prototypes(features: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The mean of (N, D) features and count - 1 centroids; all features if there are no more than centroids.

    Clusters are found among the normalized features; a centroid is the mean of the features as they are.
    """
    if not len(features):
        return features
    mean = features.mean(dim=0, keepdim=True)
    clusters = count - 1
    if clusters == 0:
        return mean
    if clusters >= len(features):
        return torch.cat([mean, features])
    members = kmeans(F.normalize(features.cpu().double(), dim=1), clusters, generator).to(features.device)
    own = [features[members == cluster] for cluster in range(clusters)]
    return torch.cat([mean, *(part.mean(dim=0, keepdim=True) for part in own if len(part))])


def kmeans(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Lloyd's algorithm from k-means++ centers: the cluster of each of (N, D) points, int64 (N,).

    Written here because scikit-learn's takes no torch generator. The first center is uniform. Each further center is a point
    drawn with probability proportional to its squared distance to the nearest center. An empty cluster keeps its center.
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
        before, members = members, _squared_distances(points, centers).argmin(dim=1)
        if torch.equal(before, members):
            break
    return members


def confident_candidates(
    seen: Candidates, confidence: Tensor, classes: int, threshold: float, needed: int
) -> Candidates | None:
    """Candidates with confidence (N,) above the threshold, which is halved until every class has more than `needed`.

    None if no threshold gives enough.
    """
    for halvings in range(THRESHOLDS):
        chosen = confidence > threshold / 2**halvings
        if int(seen.classes[chosen].bincount(minlength=classes).min()) > needed:
            return Candidates(seen.features[chosen], seen.classes[chosen])
    return None


def _squared_distances(points: Tensor, centers: Tensor) -> Tensor:
    """(N, C) of (N, D) points and (C, D) centers."""
    return torch.cdist(points, centers, compute_mode="donot_use_mm_for_euclid_dist").square()
