"""PLCB's loss from its paper, image by image; imports nothing of the package."""

from __future__ import annotations

import math

from reference.crmatch_formulas import cross_entropy, softmax


def mixed(logits, first, second, share):
    """lam * CE(y_a) + (1 - lam) * CE(y_b), averaged over images."""
    losses = [
        share * cross_entropy(one, row) + (1 - share) * cross_entropy(two, row)
        for row, one, two in zip(logits, first, second, strict=True)
    ]
    return sum(losses) / len(losses)


def class_balance(logits):
    """R_A = sum_c (1/C) log((1/C) / mean_i p_ic) without its constant: -(1/C) sum_c log mean_i p_ic."""
    probabilities = [softmax(row) for row in logits]
    classes = len(logits[0])
    means = [sum(row[label] for row in probabilities) / len(probabilities) for label in range(classes)]
    return -sum(math.log(mean) for mean in means) / classes


def entropy(logits):
    """R_H = -(1/N) sum_i sum_c p_ic log p_ic."""
    return -sum(p * math.log(p) for row in logits for p in softmax(row)) / len(logits)
