"""Whitening of 2x2 patches by plain loops over NumPy arrays. Imports nothing from crmatch."""

from __future__ import annotations

from typing import Any

import numpy as np


def patches_of(images: Any) -> Any:
    """All 2x2 patches of images (N, C, H, W), flattened in the order channel, row, column."""
    count, channels, height, width = images.shape
    return np.array(
        [
            [images[n, c, y + dy, x + dx] for c in range(channels) for dy in range(2) for dx in range(2)]
            for n in range(count)
            for y in range(height - 1)
            for x in range(width - 1)
        ]
    )


def second_moments(images: Any) -> Any:
    """Mean of p p^T over all patches p."""
    patches = patches_of(images)
    total = np.zeros((patches.shape[1], patches.shape[1]))
    for patch in patches:
        total += np.outer(patch, patch)
    return total / len(patches)
