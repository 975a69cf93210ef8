"""The formulas of the losses as pure functions. Equation numbers are those of the CR-Match paper unless stated otherwise.

Symbols of the paper, and their names here and in the methods:
    x, p / u                      labeled images, labels / unlabeled images
    alpha, A                      view "weak", view "strong"
    f at (a), f at (b)            feature_map, features
    g, z, h                       classifier, head "projection" (gives embeddings), head "rotation"
    p_hat, c = max p_hat, tau     probabilities or pseudo-labels, confidence, threshold
    1{c > tau}                    mask
    L_S, L_PseudoLabel            terms supervised, pseudo_label
    L_Dist, L_Rot                 terms feature_distance, rotation
    lambda_u, lambda_r            unlabeled_weight, rotation_weight
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
ALIGNMENT_EPSILON = 1e-6


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """l_CE per image: -sum_k q_k log softmax(logits)_k, where q is the target distribution, or the one-hot target class.

    Args:
        logits: (N, K); the result is (N,).
        targets: int64 (N,) classes, or (N, K) distributions.
        smoothing: s, which replaces q by (1 - s) * q + s / K.
    """
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(1/N) sum_i mask_i * values_i, Eq. (4): divided by the number of all images, not of the selected ones."""
    return (mask.to(values.dtype) * values).mean()


def cosine_similarity(first: Tensor, second: Tensor) -> Tensor:
    """<a, b> / (|a| |b|) per image, with norms of at least 1e-8: (N, D), (N, D) -> (N,)."""
    return F.cosine_similarity(first, second, dim=1, eps=COSINE_EPSILON)


def feature_distance(first: Tensor, second: Tensor, distance: Distance, direction: Direction, *, clamp: bool = True) -> Tensor:
    """The d of Eq. (2) per image, (N,): minimizing it pushes two embeddings apart, or pulls them together.

    Paper: names the metrics, without formulas. Here: the formulas below, because the squared l2 distance of unit vectors would
    repeat the cosine, and without normalization a negated distance is unbounded and diverges.

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
    """KL(P||M)/2 + KL(Q||M)/2 in nats, for P and Q the softmax of (N, D) values and M = (P + Q)/2: (N,) in 0..ln 2."""
    log_p, log_q = first.log_softmax(dim=1), second.log_softmax(dim=1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    kl_p = (log_p.exp() * (log_p - log_m)).sum(dim=1)
    kl_q = (log_q.exp() * (log_q - log_m)).sum(dim=1)
    return (kl_p + kl_q) / 2


def rotation_loss(logits: Tensor) -> Tensor:
    """L_Rot, Eq. (7): mean cross-entropy of the predicted rotation of 4 * Br images.

    Args:
        logits: (4 * Br, 4) in four consecutive blocks: 0, 90, 180 and 270 degrees counter-clockwise.
    """
    rotations = torch.arange(4, device=logits.device).repeat_interleave(len(logits) // 4)
    return cross_entropy(logits, rotations).mean()


def squared_difference(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over images and classes of (targets - softmax(logits))^2: (N, K) distributions -> scalar."""
    return (targets - logits.softmax(dim=1)).square().mean()


def divergence(targets: Tensor, logits: Tensor) -> Tensor:
    """KL(targets || softmax(logits)) per image: (N, K) distributions -> (N,); 0 log 0 = 0."""
    return (torch.xlogy(targets, targets) - targets * logits.log_softmax(dim=1)).sum(dim=1)


def entropy(logits: Tensor) -> Tensor:
    """H(softmax(logits)) per image, in nats: (N, K) -> (N,)."""
    log_probabilities = logits.log_softmax(dim=1)
    return -(log_probabilities.exp() * log_probabilities).sum(dim=1)


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """p_k^(1/T) / sum_k p_k^(1/T) per image, MixMatch Eq. (7)."""
    powers = probabilities ** (1 / temperature)
    return powers / powers.sum(dim=1, keepdim=True)


def align(probabilities: Tensor, target: Tensor, model: Tensor) -> Tensor:
    """Normalize(p * (target + 1e-6) / (model + 1e-6)) per image: (N, K) with (K,) -> (N, K)."""
    aligned = probabilities * ((target + ALIGNMENT_EPSILON) / (model + ALIGNMENT_EPSILON))
    return aligned / aligned.sum(dim=1, keepdim=True)


def class_shares(labels: Tensor, classes: int, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """Share of each class among int64 (N,) labels with optional weights (N,): (K,), sum 1; all 0 if all weights are 0."""
    counted = torch.ones_like(labels, dtype=dtype) if weights is None else weights.to(dtype)
    shares = torch.zeros(classes, dtype=dtype, device=labels.device).index_add_(0, labels, counted)
    return shares / counted.sum().clamp(min=1e-12)


def fairness(logits: Tensor, mask: Tensor, prediction: Tensor, histogram: Tensor) -> Tensor:
    """Fairness term of FreeMatch, Eq. (11) of its paper: sum_k P_k log Q_k over the selected images; 0 if there are none.

    P = norm(prediction / histogram), Q = norm(mean softmax(logits) / shares of the predicted classes), where x / 0 is 0.

    Args:
        logits: (N, K) of the strong views.
        mask: (N,), the selected images.
        prediction: (K,), running average of the predictions on weak views.
        histogram: (K,), running average of the shares of the predicted classes on weak views.
    """
    counted = mask.to(logits.dtype)
    probabilities = logits.softmax(dim=1)
    mean = (probabilities * counted[:, None]).sum(dim=0) / counted.sum().clamp(min=1e-12)
    shares = class_shares(probabilities.argmax(dim=1), logits.shape[1], logits.dtype, counted)
    expected, found = _normalized_ratio(prediction, histogram), _normalized_ratio(mean, shares)
    return torch.where(counted.sum() > 0, (expected * (found + 1e-12).log()).sum(), 0.0)


def _normalized_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    ratio = torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, 1.0), 0.0)
    return ratio / ratio.sum().clamp(min=1e-12)
