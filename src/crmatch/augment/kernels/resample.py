"""CTAugment's rescale: crop the same fraction off each side and resize back, with Pillow's resampling filters.

Pillow resizes along rows, then along columns. Each output value is a weighted sum of input values with integer weights of
22 bits, rounded and clipped to a byte. Here each distinct crop has a cached table of weights, and the weighted sums of a whole
batch take one copy of its rows per weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.augment.kernels.geometry import Floats, to_device

_PRECISION_BITS = 22
_PRECISION = 1 << _PRECISION_BITS
_TAPS = 7  # enough for the widest filter when enlarging


def _box(x: float) -> float:
    return float(-0.5 < x <= 0.5)


def _bilinear(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _hamming(x: float) -> float:
    if abs(x) >= 1:
        return 0.0
    return _sinc(abs(x)) * (float(np.float32(0.54)) + float(np.float32(0.46)) * math.cos(abs(x) * math.pi))


def _bicubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * -0.5 if x < 2 else 0.0


def _lanczos(x: float) -> float:
    return _sinc(x) * _sinc(x / 3) if -3 <= x < 3 else 0.0


def _sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x else 1.0


FILTERS: dict[str, tuple[Callable[[float], float], float] | None] = {
    "lanczos": (_lanczos, 3),
    "bicubic": (_bicubic, 2),
    "bilinear": (_bilinear, 1),
    "box": (_box, 0.5),
    "hamming": (_hamming, 1),
    "nearest": None,
}
"""The weight of a pixel as a function of its distance in pixels, and the distance at which it becomes 0."""


def rescale(images: Tensor, fractions: Floats, resampling: NDArray[np.int64]) -> Tensor:
    """Crop a fraction (N,), from 0 to less than 0.5, off each side and resize back.

    `images` are uint8 (N, C, H, W) with sides of at least 7, like the result; `resampling` (N,) are positions in `FILTERS`.
    """
    rows_done = _resize_columns(images.mT.contiguous(), fractions, resampling)
    return _resize_columns(rows_done.mT.contiguous(), fractions, resampling)


def _resize_columns(images: Tensor, fractions: Floats, resampling: NDArray[np.int64]) -> Tensor:
    """Crop and resize along the columns only: each output row is a weighted sum of whole input rows."""
    count, channels, height, width = images.shape
    crops = np.stack((np.rint(fractions * height), np.rint(height * (1 - fractions)), resampling), axis=1).astype(np.int64)
    distinct, which = np.unique(crops, axis=0, return_inverse=True)
    tables = [_taps(height, *crop) for crop in distinct.tolist()]
    firsts = np.stack([first for first, _ in tables])[which]
    weights = np.ascontiguousarray(np.moveaxis(np.stack([weight for _, weight in tables])[which], 2, 0))
    planes = np.arange(count * channels).reshape(count, channels, 1) * height
    positions = to_device((planes + firsts[:, None]).reshape(-1), images.device)
    rows = images.view(-1, width)
    total = torch.full(images.shape, _PRECISION // 2, dtype=torch.int32, device=images.device)
    for tap in range(_TAPS):
        taken = rows.index_select(0, positions + tap).to(torch.int32).view(images.shape)
        total.add_(taken.mul_(to_device(weights[tap, :, None, :, None], images.device)))
    return total.bitwise_right_shift_(_PRECISION_BITS).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=4096)
def _taps(size: int, begin: int, end: int, resampling: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Pillow's weights for resizing the pixels begin..end - 1 to `size` pixels: firsts (size,), weights (size, _TAPS)."""
    chosen = tuple(FILTERS.values())[resampling]
    step = (end - begin) / size
    nearest = step * 0.5
    firsts, weights = np.zeros(size, dtype=np.int64), np.zeros((size, _TAPS), dtype=np.int32)
    for row in range(size):
        if end - begin == size:  # nothing was cut off along this axis, so Pillow does not resample it
            first, values = row, [1.0]
        elif chosen is None:
            first, values = int(nearest), [1.0]
            nearest += step
        else:
            center = (row + 0.5) * step
            weight, support = chosen
            first = max(int(center - support + 0.5), 0)
            last = min(int(center + support + 0.5), end - begin)
            values = [weight(column - center + 0.5) for column in range(first, last)]
        firsts[row] = min(begin + first, size - _TAPS)
        offset, total = begin + first - firsts[row], sum(values)
        for tap, value in enumerate(values, offset):
            weights[row, tap] = math.trunc(value / total * _PRECISION + math.copysign(0.5, value))
    return firsts, weights
