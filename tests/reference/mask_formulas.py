"""Confidence rules with their memories, image by image: FlexMatch, FreeMatch, SoftMatch, AdaMatch, and alignment.

Written from the papers and their public code, without looking at the package. Nothing of the package is imported here, and no
torch. One object follows one run: each `step` gets the logits of a batch and gives the weight of every image.
"""

from __future__ import annotations

import math

import numpy as np

from reference.crmatch_formulas import cross_entropy, softmax

ALIGNMENT_EPSILON = 1e-6
LOGARITHM_EPSILON = 1e-12


def column_means(rows):
    """The mean of each class over the rows."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def normalized(values):
    """Values divided by their sum."""
    return [value / sum(values) for value in values]


def inverse(value):
    """1 / value, and 0 for 1 / 0."""
    return 1.0 / value if value else 0.0


class Rule:
    """One confidence rule and everything it remembers."""

    def __init__(
        self,
        classes,
        images,
        *,
        mask,
        alignment="none",
        threshold=0.95,
        ties="exclude",
        average_decay=0.999,
        free_quantile=None,
        free_clip=None,
        soft_sigmas=2.0,
    ):
        self.classes, self.mask, self.alignment = classes, mask, alignment
        self.threshold, self.ties, self.decay = threshold, ties, average_decay
        self.quantile, self.clip, self.sigmas = free_quantile, free_clip, soft_sigmas
        uniform = [1.0 / classes] * classes
        self.unlabeled_average, self.labeled_average = None, list(uniform)
        self.last_confident_label = [-1] * images
        self.global_threshold, self.local, self.histogram = 1.0 / classes, list(uniform), list(uniform)
        self.mu, self.variance = 1.0 / classes, 1.0

    def step(self, weak_logits, labeled_logits, positions):
        """(labels, distributions they come from, weights) of one batch."""
        raw = [softmax(row) for row in weak_logits]
        labeled = [softmax(row) for row in labeled_logits]
        aligned = self.align(raw, labeled)
        chosen = raw if self.mask == "soft" else aligned
        labels = [row.index(max(row)) for row in chosen]
        weights = getattr(self, self.mask)(aligned, labels, labeled, positions)
        return labels, chosen, weights

    def align(self, raw, labeled):
        """norm(p * target / EMA(p)): the averages take the batch in, then they are used.

        The average of unlabeled predictions starts with its first batch, that of labeled ones is uniform before it.
        """
        if self.alignment == "none":
            return raw
        self.unlabeled_average = self.begin_or_average(self.unlabeled_average, column_means(raw))
        target = [1.0 / self.classes] * self.classes
        if self.alignment == "labeled":
            target = self.labeled_average = self.average(self.labeled_average, column_means(labeled))
        factors = [
            (t + ALIGNMENT_EPSILON) / (a + ALIGNMENT_EPSILON) for t, a in zip(target, self.unlabeled_average, strict=True)
        ]
        return [normalized([p * factor for p, factor in zip(row, factors, strict=True)]) for row in raw]

    def begin_or_average(self, old, new):
        return new if old is None else self.average(old, new)

    def average(self, old, new):
        return [self.decay * a + (1.0 - self.decay) * b for a, b in zip(old, new, strict=True)]

    def passes(self, confidence, threshold):
        return float(confidence >= threshold if self.ties == "include" else confidence > threshold)

    def fixed(self, probabilities, labels, labeled, positions):
        return [self.passes(max(row), self.threshold) for row in probabilities]

    def flex(self, probabilities, labels, labeled, positions):
        """The thresholds of the step before, then the memory of this one."""
        counts = [self.last_confident_label.count(k) for k in range(self.classes)]
        unused = self.last_confident_label.count(-1)
        betas = [count / max(max(counts), unused) for count in counts]
        thresholds = [self.threshold * beta / (2.0 - beta) for beta in betas]
        weights = [self.passes(max(row), thresholds[label]) for row, label in zip(probabilities, labels, strict=True)]
        for row, label, position in zip(probabilities, labels, positions, strict=True):
            if max(row) >= self.threshold:
                self.last_confident_label[position] = label
        return weights

    def free(self, probabilities, labels, labeled, positions):
        """Averages of this batch first, then a threshold t * p~_c / max p~ for each class c."""
        confidences = [max(row) for row in probabilities]
        seen = sum(confidences) / len(confidences) if self.quantile is None else float(np.quantile(confidences, self.quantile))
        (self.global_threshold,) = self.average([self.global_threshold], [seen])
        if self.clip is not None:
            self.global_threshold = min(self.global_threshold, self.clip)
        self.local = self.average(self.local, column_means(probabilities))
        shares = [labels.count(k) / len(labels) for k in range(self.classes)]
        self.histogram = self.average(self.histogram, shares)
        thresholds = [self.global_threshold * share / max(self.local) for share in self.local]
        return [self.passes(confidence, thresholds[label]) for confidence, label in zip(confidences, labels, strict=True)]

    def soft(self, probabilities, labels, labeled, positions):
        """1 from the mean confidence upwards, a Gaussian below; the averages take the batch in first."""
        confidences = [max(row) for row in probabilities]
        mean = sum(confidences) / len(confidences)
        spread = sum((value - mean) ** 2 for value in confidences) / (len(confidences) - 1)
        self.mu, self.variance = self.average([self.mu, self.variance], [mean, spread])
        narrowed = 2.0 * self.variance / self.sigmas**2
        return [1.0 if value >= self.mu else math.exp(-((value - self.mu) ** 2) / narrowed) for value in confidences]

    def ada(self, probabilities, labels, labeled, positions):
        """tau relative to how confident the network is on the labeled batch."""
        threshold = self.threshold * sum(max(row) for row in labeled) / len(labeled)
        return [self.passes(max(row), threshold) for row in probabilities]

    def fairness(self, strong_logits, weights):
        """FreeMatch: sum_c P_c log Q_c, P = norm(p~ / h~), Q = norm(mean of softmax(strong) / histogram) of the selected."""
        selected = [softmax(row) for row, weight in zip(strong_logits, weights, strict=True) if weight]
        if not selected:
            return 0.0
        predicted = [row.index(max(row)) for row in selected]
        shares = [predicted.count(k) / len(predicted) for k in range(self.classes)]
        p = normalized([local * inverse(share) for local, share in zip(self.local, self.histogram, strict=True)])
        q = normalized([average * inverse(share) for average, share in zip(column_means(selected), shares, strict=True)])
        return sum(one * math.log(other + LOGARITHM_EPSILON) for one, other in zip(p, q, strict=True))


def weighted_pseudo_label(targets, strong_logits, weights):
    """(1/Bu) sum_j weight_j CE(target_j, strong logits_j); a target is a label or a distribution."""
    losses = [cross_entropy(target, row) for target, row in zip(targets, strong_logits, strict=True)]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / len(losses)
