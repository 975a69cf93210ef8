"""Pillow's small convolution filters on uint8 images."""

from __future__ import annotations

import torch
from torch import Tensor


def smooth(images: Tensor) -> Tensor:
    """``ImageFilter.SMOOTH``: (sum of the 3 x 3 neighborhood + 4 * center) / 13, rounded; the border stays as it is.

    Pillow adds up nine float32 products and 0.5, then truncates. The exact value, (2 S + 13) / 26 with an integer S, is
    never nearer than 1/26 to an integer, so integer arithmetic gives the same pixels.

    Args:
        images: uint8 (N, C, H, W).

    Returns:
        int16 (N, C, H, W).
    """
    smoothed = images.to(torch.int16)
    rows = smoothed[:, :, :-2] + smoothed[:, :, 1:-1] + smoothed[:, :, 2:]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * smoothed[:, :, 1:-1, 1:-1]
    smoothed[:, :, 1:-1, 1:-1] = (2 * total.to(torch.int32) + 13) // 26
    return smoothed
