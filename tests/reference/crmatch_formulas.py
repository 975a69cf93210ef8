"""CR-Match image by image: the formulas of the paper as loops over images, in NumPy and plain Python.

Written from the paper (Eqs. 1 to 7 and the algorithm of its appendix), without looking at the package. Nothing of the package
is imported here, and no torch: both can agree only because they follow the same text. Slow, obvious, in float64.
"""

from __future__ import annotations

import math

import numpy as np

COSINE_EPSILON = 1e-8
SQUARE_ROOT_EPSILON = 1e-12


def log_softmax(logits):
    """Logarithms of the class probabilities of ONE image."""
    largest = max(float(value) for value in logits)
    total = sum(math.exp(float(value) - largest) for value in logits)
    return [float(value) - largest - math.log(total) for value in logits]


def softmax(logits):
    """Class probabilities of ONE image; equal logits give exactly equal shares."""
    largest = max(float(value) for value in logits)
    exponentials = [math.exp(float(value) - largest) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def one_hot(label, classes):
    """A label as a distribution."""
    return [1.0 if k == label else 0.0 for k in range(classes)]


def cross_entropy(target, logits):
    """H(target, softmax(logits)) of ONE image; `target` is a label or a distribution over the classes."""
    if np.ndim(target) == 0:
        target = one_hot(int(target), len(logits))
    return -sum(float(t) * log_p for t, log_p in zip(target, log_softmax(logits), strict=True))


def norm(vector):
    """The Euclidean length of a vector."""
    return math.sqrt(sum(float(value) ** 2 for value in vector))


def cosine(first, second):
    """The cosine of the angle between two vectors; 0 if one of them is zero."""
    dot = sum(float(a) * float(b) for a, b in zip(first, second, strict=True))
    return dot / (max(norm(first), COSINE_EPSILON) * max(norm(second), COSINE_EPSILON))


def squared_l2(first, second):
    """Eq. (1) for ONE image: || first - second ||^2, on the features as they are."""
    return sum((float(a) - float(b)) ** 2 for a, b in zip(first, second, strict=True))


def unit_l2(first, second):
    """The distance of two vectors after each was scaled to length 1, between 0 and 2."""
    first = [float(value) / max(norm(first), SQUARE_ROOT_EPSILON) for value in first]
    second = [float(value) / max(norm(second), SQUARE_ROOT_EPSILON) for value in second]
    return math.sqrt(squared_l2(first, second) + SQUARE_ROOT_EPSILON)


def kullback_leibler(first, second):
    """KL(first || second) of two distributions, in nats; 0 log 0 = 0."""
    return sum(p * math.log(p / q) for p, q in zip(first, second, strict=True) if p > 0)


def jensen_shannon(first, second):
    """JS of the softmax over the dimensions of two vectors, in nats, between 0 and ln 2."""
    p, q = softmax(first), softmax(second)
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return kullback_leibler(p, middle) / 2 + kullback_leibler(q, middle) / 2


def feature_distance(distance, direction, first, second, clamp=True):
    """d of Eq. (2) for ONE image: what is minimized for two embedded views.

    Invariance minimizes a distance (pulls together), equivariance a similarity (pushes apart).
    """
    pull = direction == "invariance"
    if distance == "cosine":
        similarity = cosine(first, second)
        if pull:
            return 1.0 - similarity
        return max(0.0, similarity) if clamp else similarity
    if distance == "l2":
        length = unit_l2(first, second)
        return length if pull else 1.0 - length / 2
    if distance == "js":
        divergence = jensen_shannon(first, second)
        return divergence if pull else -divergence
    if distance == "squared_l2" and pull:
        return squared_l2(first, second)
    raise ValueError(f"no formula for {distance} with {direction}")


def is_confident(probabilities, threshold, ties):
    """1{c > threshold} with c = max p; `ties="include"` is the public code's c >= threshold."""
    confidence = max(probabilities)
    return confidence >= threshold if ties == "include" else confidence > threshold


def pooled(feature_map):
    """Point (b) from point (a) for ONE image: the mean over all positions of each of the D channels."""
    return [float(np.mean(channel)) for channel in feature_map]


def flattened(feature_map):
    """Point (a) of ONE image as a vector, in the order (D, h, w)."""
    return [float(value) for channel in feature_map for row in channel for value in row]


def linear(vector, weight, bias):
    """One fully connected layer: weight (out, in), bias (out,)."""
    vector = np.asarray(vector, dtype=np.float64)
    return [float(np.dot(row, vector)) + float(b) for row, b in zip(weight, bias, strict=True)]


def relu(vector):
    """Negative values become 0."""
    return [max(0.0, value) for value in vector]


def layers(vector, weights):
    """Fully connected layers with ReLU between them: none, one (linear) or two (MLP, and the rotation head h)."""
    for position, (weight, bias) in enumerate(weights):
        vector = linear(relu(vector) if position else vector, weight, bias)
    return vector


def rotated(image, quarter_turns):
    """ONE image (C, H, W) turned counter-clockwise by 90 degrees as often as asked, pixel by pixel."""
    for _ in range(quarter_turns):
        channels, height, width = image.shape
        turned = np.empty((channels, width, height), dtype=image.dtype)
        for row in range(height):
            for column in range(width):
                # The last column becomes the first row: what pointed right points up.
                turned[:, width - 1 - column, row] = image[:, row, column]
        image = turned
    return image


def supervised_loss(labels, logits):
    """L_S, Eq. (6): the mean over the labeled images."""
    values = [cross_entropy(int(label), row) for label, row in zip(labels, logits, strict=True)]
    return sum(values) / len(values)


def pseudo_label_loss(weak_logits, strong_logits, threshold, ties="exclude", soft=False):
    """The pseudo-label half of L_U, Eqs. (3) and (4): divided by ALL unlabeled images."""
    total = 0.0
    for weak, strong in zip(weak_logits, strong_logits, strict=True):
        probabilities = softmax(weak)
        if is_confident(probabilities, threshold, ties):
            target = probabilities if soft else probabilities.index(max(probabilities))
            total += cross_entropy(target, strong)
    return total / len(weak_logits)


def feature_distance_loss(
    first,
    second,
    weak_logits,
    threshold,
    distance="cosine",
    direction="equivariance",
    clamp=True,
    ties="exclude",
    thresholded=True,
):
    """The distance half of L_U, Eqs. (2) and (4), from two embedded views (N, D): divided by ALL unlabeled images."""
    total = 0.0
    for one, other, weak in zip(first, second, weak_logits, strict=True):
        if not thresholded or is_confident(softmax(weak), threshold, ties):
            total += feature_distance(distance, direction, one, other, clamp)
    return total / len(weak_logits)


def rotation_loss(logits_by_turn):
    """L_Rot, Eq. (7): four lists (0, 90, 180, 270 degrees) of the head's logits, averaged over all 4 * B_r images."""
    total, images = 0.0, 0
    for turns, logits in enumerate(logits_by_turn):
        for row in logits:
            total += cross_entropy(turns, row)
            images += 1
    return total / images


PAIRS = {"weak-weak": ("weak", "second_weak"), "weak-strong": ("weak", "strong"), "strong-strong": ("strong", "second_strong")}


def crmatch_terms(
    maps,
    labels,
    classifier,
    projection=(),
    rotation=None,
    upright=None,
    *,
    threshold,
    ties="exclude",
    soft=False,
    pair=None,
    point="a",
    **distance,
):
    """All terms of Eq. (5) from the feature maps of one joint pass, and which unlabeled images are confident.

    Args:
        maps: group of images -> its feature maps (N, D, h, w): `labeled`, `weak`, `strong`, `second_weak`,
            `second_strong`, `rotation`, and `turned 90`, `turned 180`, `turned 270`.
        labels: classes of the labeled images.
        classifier: weight and bias of g, as a list of one layer.
        projection: the layers of z; none of them: features are compared as they are.
        rotation: the layers of h; None: no rotation term.
        upright: group -> how many of its first images were turned.
        threshold: tau.
        ties: whether images with a confidence equal to tau are used.
        soft: whether the pseudo-label is the whole distribution.
        pair: which two views are compared; None: no distance term.
        point: where features are taken: (a) the map, or (b) its mean over positions.
        **distance: choices of `feature_distance_loss`.
    """
    vectors = {name: [pooled(image) for image in group] for name, group in maps.items()}
    logits = {name: [layers(image, classifier) for image in group] for name, group in vectors.items()}
    confident = [is_confident(softmax(row), threshold, ties) for row in logits["weak"]]
    terms = {
        "supervised": supervised_loss(labels, logits["labeled"]),
        "pseudo_label": pseudo_label_loss(logits["weak"], logits["strong"], threshold, ties, soft),
    }
    if pair is not None:
        groups = ([pooled(image) if point == "b" else flattened(image) for image in maps[name]] for name in PAIRS[pair])
        first, second = ([layers(vector, projection) for vector in group] for group in groups)
        terms["feature_distance"] = feature_distance_loss(first, second, logits["weak"], threshold, ties=ties, **distance)
    if rotation is not None:
        still = [vector for name, count in upright.items() for vector in vectors[name][:count]]
        blocks = [still, *(vectors[f"turned {degrees}"] for degrees in (90, 180, 270))]
        terms["rotation"] = rotation_loss([[layers(vector, rotation) for vector in block] for block in blocks])
    return terms, confident
