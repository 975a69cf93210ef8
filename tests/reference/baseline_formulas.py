"""The semi-supervised baselines image by image: ramps, targets, mixtures and terms as loops, in NumPy and plain Python.

Written from the papers and their public code, without looking at the package. Nothing of the package is imported here, and
no torch. Distributions and logits are lists of rows, one per image.
"""

from __future__ import annotations

import math

import numpy as np

from reference.crmatch_formulas import (
    cross_entropy,
    kullback_leibler,
    linear,
    log_softmax,
    norm,
    one_hot,
    rotated,
    softmax,
)

ALIGNMENT_EPSILON = 1e-6
REFERENCE_STEPS = 1_048_576


def mean(values):
    """The plain mean; every loss below is one."""
    values = list(values)
    return sum(values) / len(values)


def ramp(step, steps, shape="linear"):
    """From 0 to 1 over the first `steps` steps: t / steps, or exp(-5 (1 - t / steps)^2)."""
    done = 1.0 if step >= steps else step / steps
    return done if shape == "linear" else math.exp(-5.0 * (1.0 - done) ** 2)


def ramp_in_run(step, steps, total, published=REFERENCE_STEPS):
    """A linear ramp that takes `steps` of the `published` steps, in a run of `total`: in proportion, but not below 16,384."""
    shortest = 16_384 if steps > 16_384 else steps
    in_proportion = steps * total / published
    return ramp(step, in_proportion if in_proportion > shortest else shortest)


def smoothed(label, classes, smoothing):
    """A label as a distribution that gives the share `smoothing` to all classes alike."""
    return [(1.0 - smoothing) * value + smoothing / classes for value in one_hot(label, classes)]


def supervised(labels, logits, smoothing=0.0):
    """CE of the labeled images."""
    return mean(cross_entropy(smoothed(label, len(row), smoothing), row) for label, row in zip(labels, logits, strict=True))


def soft_cross_entropy(targets, logits):
    """CE with a distribution as the target of each image."""
    return mean(cross_entropy(target, row) for target, row in zip(targets, logits, strict=True))


def mean_squared_difference(first, second):
    """The mean over images AND classes of squared differences."""
    return mean(
        (float(a) - float(b)) ** 2 for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


def mean_entropy(logits):
    """The mean entropy of the predictions, in nats."""
    return mean(-sum(math.exp(value) * value for value in log_softmax(row)) for row in logits)


def mean_divergence(targets, logits):
    """The mean over images of KL(target || softmax(logits))."""
    return mean(kullback_leibler(target, softmax(row)) for target, row in zip(targets, logits, strict=True))


def sharpened(probabilities, temperature):
    """p_c^(1/T) / sum: T below 1 makes a distribution more certain."""
    powers = [value ** (1.0 / temperature) for value in probabilities]
    return [value / sum(powers) for value in powers]


def guessed(views, temperature):
    """MixMatch's label of each image: the mean of its views' predictions, sharpened."""
    images = zip(*views, strict=True)
    averages = ([mean(values) for values in zip(*map(softmax, rows), strict=True)] for rows in images)
    return [sharpened(row, temperature) for row in averages]


def mixed(rows, shares, partners):
    """MixUp: row i becomes lam_i * row_i + (1 - lam_i) * row_partner(i)."""
    rows = [np.asarray(row, dtype=np.float64) for row in rows]
    return np.stack(
        [share * row + (1.0 - share) * rows[partner] for row, share, partner in zip(rows, shares, partners, strict=True)]
    )


def interleaved(rows, groups):
    """Which rows each of the `groups` sub-batches takes, so that all have the same mixture: every groups-th one."""
    return [[row for row in range(rows) if row % groups == group] for group in range(groups)]


def joint_mean_teacher(labels, class_head, consistency_head, teacher):
    """LP-DeepSSL's terms for a batch of N images whose first ones are labeled: each is a sum over images, divided by N."""
    images = len(class_head)
    known = sum(cross_entropy(label, class_head[position]) for position, label in enumerate(labels))
    rows = list(zip(class_head, consistency_head, teacher, strict=True))
    distance = sum(mean((a - b) ** 2 for a, b in zip(one, two, strict=True)) for one, two, _ in rows)
    consistency = sum(mean((a - b) ** 2 for a, b in zip(softmax(two), softmax(three), strict=True)) for _, two, three in rows)
    return {"supervised": known / images, "logit_distance": distance / images, "consistency": consistency / images}


def pseudo_label(logits, threshold, ties="exclude"):
    """1[max p_j > tau] CE(argmax p_j, logits_j) on the SAME view, one mask per image, divided by all; and the mask."""
    total, used = 0.0, []
    for row in logits:
        probabilities = softmax(row)
        confidence = max(probabilities)
        used.append(confidence >= threshold if ties == "include" else confidence > threshold)
        if used[-1]:
            total += cross_entropy(probabilities.index(confidence), row)
    return total / len(used), used


def uda_consistency(weak, strong, temperature, threshold, ties="exclude"):
    """m_j KL(softmax(w_j / T) || softmax(s_j)), divided by all; m_j from the prediction before it is sharpened."""
    total, used = 0.0, []
    for one, other in zip(weak, strong, strict=True):
        confidence = max(softmax(one))
        used.append(confidence >= threshold if ties == "include" else confidence > threshold)
        if used[-1]:
            total += kullback_leibler(softmax([value / temperature for value in one]), softmax(other))
    return total / len(used), used


def tsa_threshold(schedule, step, total, classes):
    """eta_t = alpha_t (1 - 1/C) + 1/C."""
    done = step / total
    alpha = {"linear": done, "exp": math.exp(5.0 * (done - 1.0)), "log": 1.0 - math.exp(-5.0 * done)}[schedule]
    return alpha * (1.0 - 1.0 / classes) + 1.0 / classes


def tsa_supervised(labels, logits, schedule, step, total):
    """CE of the labeled images whose true class has a probability of at most eta_t, averaged over these; 0 without any."""
    kept = [
        cross_entropy(int(label), row)
        for label, row in zip(labels, logits, strict=True)
        if softmax(row)[label] <= tsa_threshold(schedule, step, total, len(row))
    ]
    return (mean(kept) if kept else 0.0), len(kept)


def unit(image):
    """ONE image scaled to length 1."""
    return np.asarray(image, dtype=np.float64) / norm(np.asarray(image, dtype=np.float64).ravel())


def linear_vat_gradients(images, probed, weight, bias):
    """Gradient of the mean KL(p(u) || p(u + xi d)) with respect to u + xi d, for logits W (channel means of u) + b."""
    gradients = []
    for image, moved in zip(images, probed, strict=True):
        _, height, width = image.shape
        p, q = (softmax(linear([channel.mean() for channel in x], weight, bias)) for x in (image, moved))
        by_channel = [
            sum((q[k] - p[k]) * weight[k][c] for k in range(len(p))) / (height * width * len(images)) for c in range(len(image))
        ]
        gradients.append(np.stack([np.full((height, width), value) for value in by_channel]))
    return gradients


def quarter_turns(images):
    """ReMixMatch's rotation task: a quarter of the batch per angle, the turned images and how often each was turned."""
    turns = [(4 * position) // len(images) for position in range(len(images))]
    return [rotated(image, count) for image, count in zip(images, turns, strict=True)], turns


class ReMixMatchAlignment:
    """p_model = mean of the last batches' mean predictions, p_data = EMA of the labels; both start uniform."""

    def __init__(self, classes, memory_batches, decay):
        self.classes, self.decay = classes, decay
        self.data = [1.0 / classes] * classes
        self.memory = [[1.0 / classes] * classes for _ in range(memory_batches)]

    def step(self, labels, weak_logits, temperature):
        """The targets of this batch, which enters the averages only afterwards."""
        model = [mean(column) for column in zip(*self.memory, strict=True)]
        predictions = [softmax(row) for row in weak_logits]
        targets = []
        for row in predictions:
            scaled = [
                p * (d + ALIGNMENT_EPSILON) / (m + ALIGNMENT_EPSILON) for p, d, m in zip(row, self.data, model, strict=True)
            ]
            targets.append(sharpened([value / sum(scaled) for value in scaled], temperature))
        self.memory = [*self.memory[1:], [mean(column) for column in zip(*predictions, strict=True)]]
        share = [mean(float(label == k) for label in labels) for k in range(self.classes)]
        self.data = [self.decay * old + (1.0 - self.decay) * new for old, new in zip(self.data, share, strict=True)]
        return targets


class UsbAlignment:
    """ReMixMatch in USB: p_data = histogram of all labels, p_model = EMA of mean predictions that starts at the first batch."""

    def __init__(self, classes, labels, decay):
        self.data = [mean(float(label == k) for label in labels) for k in range(classes)]
        self.model, self.decay = None, decay

    def step(self, weak_logits, temperature):
        """The targets of this batch, which has entered the average before."""
        predictions = [softmax(row) for row in weak_logits]
        new = [mean(column) for column in zip(*predictions, strict=True)]
        old = new if self.model is None else self.model
        self.model = [self.decay * a + (1.0 - self.decay) * b for a, b in zip(old, new, strict=True)]
        targets = []
        for row in predictions:
            scaled = [
                p * (d + ALIGNMENT_EPSILON) / (m + ALIGNMENT_EPSILON)
                for p, d, m in zip(row, self.data, self.model, strict=True)
            ]
            targets.append(sharpened([value / sum(scaled) for value in scaled], temperature))
        return targets


def squared_difference_gradient(targets, logits):
    """Gradient of `mean_squared_difference(targets, softmax(logits))` by the logits, the targets held fixed."""
    rows = []
    for target, row in zip(targets, logits, strict=True):
        p = softmax(row)
        difference = [a - b for a, b in zip(p, target, strict=True)]
        along = sum(a * d for a, d in zip(p, difference, strict=True))
        rows.append([2.0 * a * (d - along) / (len(p) * len(logits)) for a, d in zip(p, difference, strict=True)])
    return rows


def cross_entropy_gradient(targets, logits, used=None):
    """Gradient by the logits of the mean of used * CE(target, softmax(logits)), or of KL: the targets held fixed."""
    used = [1.0] * len(logits) if used is None else used
    return [
        [float(u) * (a - float(t)) / len(logits) for a, t in zip(softmax(row), target, strict=True)]
        for target, row, u in zip(targets, logits, used, strict=True)
    ]


def entropy_gradient(logits):
    """Gradient of `mean_entropy` by the logits: -p_k (log p_k + H) / N."""
    rows = []
    for row in logits:
        logs = log_softmax(row)
        entropy = -sum(math.exp(value) * value for value in logs)
        rows.append([-math.exp(value) * (value + entropy) / len(logits) for value in logs])
    return rows
