"""Every formula of the losses as a pure function; equation numbers are the paper's.

Paper symbol -> name here and in the methods:
    x_s, y / x_u              labeled, labels / unlabeled
    alpha, A                  view "weak", view "strong"
    f at (a) / at (b)         feature_map / features
    z                         head "projection", its value an embedding
    p, c = max p, 1{c > tau}  probabilities, confidence, confident
    L_S, L_PseudoLabel        terms supervised, pseudo_label
    L_Dist, L_Rot             terms feature_distance, rotation
    lambda                    <term>_weight; lambda_u is unlabeled_weight
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Distance = Literal["cosine", "l2", "squared_l2", "js"]
Direction = Literal["equivariance", "invariance"]
COSINE_EPSILON = 1e-8
L2_EPSILON = 1e-12


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """l_CE per image: -log softmax(logits)[label], or -sum_k targets_k log softmax(logits)_k for distributions.

    Args:
        logits: (N, K).
        targets: int64 (N,) classes, or (N, K) distributions.

    Returns:
        (N,).
    """
    return F.cross_entropy(logits, targets, reduction="none")


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(1/N) sum_i mask_i * values_i, Eq. (4): divided by all N images, not by the selected ones."""
    return (mask.to(values.dtype) * values).mean()


def cosine_similarity(first: Tensor, second: Tensor) -> Tensor:
    """<a, b> / (|a| |b|) per image, norms at least 1e-8: (N, D), (N, D) -> (N,)."""
    return F.cosine_similarity(first, second, dim=1, eps=COSINE_EPSILON)


def feature_distance(first: Tensor, second: Tensor, distance: Distance, direction: Direction, *, clamp: bool = True) -> Tensor:
    """D of Eq. (2) per image: what is minimized to push two embeddings apart, or to pull them together.

    Paper: only names the metrics. Here: the definitions of the specification, because
    the unsquared l2 of unit vectors differs from cosine, and bounded values cannot diverge.

    | distance   | invariance (pull)        | equivariance (push)                             |
    |------------|--------------------------|-------------------------------------------------|
    | cosine     | 1 - cos                  | max(0, cos); cos without `clamp`                |
    | l2         | |a/|a| - b/|b||          | 1 - |a/|a| - b/|b|| / 2                         |
    | squared_l2 | |a - b|^2, Eq. (1)       | none: it has no lower bound                     |
    | js         | JS(softmax a, softmax b) | -JS                                             |

    Args:
        first: (N, D) embeddings, e.g. of the strong view.
        second: (N, D), e.g. of the weak view.
        distance: the metric.
        direction: `equivariance` pushes apart, `invariance` pulls together.
        clamp: stop pushing at 90 degrees (cosine only).

    Returns:
        (N,).
    """
    pull = direction == "invariance"
    if distance == "cosine":
        cosine = cosine_similarity(first, second)
        if pull:
            return 1 - cosine
        return cosine.relu() if clamp else cosine
    if distance == "l2":
        difference = F.normalize(first, dim=1) - F.normalize(second, dim=1)
        norm = (difference.square().sum(dim=1) + L2_EPSILON).sqrt()
        return norm if pull else 1 - norm / 2
    if distance == "js":
        divergence = jensen_shannon(first, second)
        return divergence if pull else -divergence
    if not pull:
        raise ValueError("squared_l2 has no lower bound and cannot be pushed; use invariance, or distance l2")
    return (first - second).square().sum(dim=1)


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """JS = KL(P||M)/2 + KL(Q||M)/2 in nats, P and Q the softmax of (N, D) values, M = (P + Q)/2: (N,) in 0..ln 2."""
    log_p, log_q = first.log_softmax(dim=1), second.log_softmax(dim=1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    kl_p = (log_p.exp() * (log_p - log_m)).sum(dim=1)
    kl_q = (log_q.exp() * (log_q - log_m)).sum(dim=1)
    return (kl_p + kl_q) / 2


def rotation_loss(logits: Tensor) -> Tensor:
    """L_Rot, Eq. (7): mean cross-entropy of the rotation of 4 * Br images.

    Args:
        logits: (4 * Br, 4) in four consecutive blocks: 0, 90, 180 and 270 degrees counter-clockwise.
    """
    rotations = torch.arange(4, device=logits.device).repeat_interleave(len(logits) // 4)
    return cross_entropy(logits, rotations).mean()
