"""Reduces an image to a smaller square, pixel by pixel: bilinear interpolation with antialiasing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def reduced(image: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """(C, H, H) -> (C, size, size).

    With s = H / size, pixel i of the result is centered at c = (i + 1/2) s in the image. The weight of an image pixel j is
    max(0, 1 - |j + 1/2 - c| / s), a triangle as wide as two pixels of the result, divided by the sum of the weights.
    """
    side = image.shape[1]
    scale = side / size
    weights = np.zeros((size, side))
    for i in range(size):
        for j in range(side):
            weights[i, j] = max(0.0, 1 - abs(j + 0.5 - (i + 0.5) * scale) / scale)
        weights[i] /= weights[i].sum()
    result = np.zeros((len(image), size, size))
    for channel in range(len(image)):
        for row in range(size):
            for column in range(size):
                result[channel, row, column] = weights[row] @ image[channel] @ weights[column]
    return result
