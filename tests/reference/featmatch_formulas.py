"""FeatMatch from its paper and code in plain loops over lists; imports nothing of the package."""

from __future__ import annotations

import math

from reference.crmatch_formulas import relu, softmax


def dot(one, two):
    return sum(a * b for a, b in zip(one, two, strict=True))


def linear(weight, bias, vector):
    return [dot(row, vector) + shift for row, shift in zip(weight, bias, strict=True)]


def refined(feature, prototypes, embeddings, mixers, combination):
    """x_g of one feature x: `embeddings`, `mixers` hold (weight, bias) per head, `combination` is (weight, bias)."""
    heads = []
    for embedding, mixer in zip(embeddings, mixers, strict=True):
        query = linear(*embedding, feature)
        keys = [linear(*embedding, prototype) for prototype in prototypes]
        attention = softmax([dot(query, key) / math.sqrt(len(query)) for key in keys])
        gathered = [sum(w * key[i] for w, key in zip(attention, keys, strict=True)) for i in range(len(query))]
        heads += relu(linear(*mixer, gathered + query))
    return relu([x + y for x, y in zip(feature, linear(*combination, heads), strict=True)])


def distance(one, two):
    return sum((a - b) ** 2 for a, b in zip(one, two, strict=True))


def mean(vectors):
    return [sum(values) / len(vectors) for values in zip(*vectors, strict=True)]


def kmeans(points, shares):
    """Clusters of points by k-means++ and Lloyd; `shares` are the uniform numbers that choose the centers."""
    centers = [points[int(shares[0] * len(points))]]
    for share in shares[1:]:
        nearest = [min(distance(point, center) for center in centers) for point in points]
        limit, running = share * sum(nearest), 0.0
        for point, value in zip(points, nearest, strict=True):
            running += value
            if running > limit:
                centers.append(point)
                break
    members = None
    while True:
        renewed = [min(range(len(centers)), key=lambda c: distance(point, centers[c])) for point in points]
        if renewed == members:
            return members
        members = renewed
        for cluster in range(len(centers)):
            own = [point for point, member in zip(points, members, strict=True) if member == cluster]
            centers[cluster] = mean(own) if own else centers[cluster]


def class_prototypes(features, count, draw):
    """The mean and count - 1 centroids; `draw(n)` gives n uniform numbers."""
    if count == 1:
        return [mean(features)]
    if count - 1 >= len(features):
        return [mean(features), *features]
    lengths = [math.sqrt(dot(feature, feature)) for feature in features]
    units = [[value / length for value in feature] for feature, length in zip(features, lengths, strict=True)]
    members = kmeans(units, draw(count - 1))
    clusters = [[f for f, member in zip(features, members, strict=True) if member == c] for c in range(count - 1)]
    return [mean(features), *(mean(cluster) for cluster in clusters if cluster)]


def confident(predicted, confidence, classes, threshold, needed):
    """Positions of the images that are used; None if some class never has enough."""
    for _ in range(5):
        chosen = [i for i, value in enumerate(confidence) if value > threshold]
        if all(sum(predicted[i] == label for i in chosen) > needed for label in range(classes)):
            return chosen
        threshold /= 2
    return None
