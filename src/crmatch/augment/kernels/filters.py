"""Pillow's small convolution filters on uint8 images; they leave the border as it is.

Sums run over the flat memory of the whole batch, which is fast; what they add up across the edges of an image falls on
the border and is left out. Pillow adds up float32 products and 0.5, then truncates; as the exact values are never within
rounding error of an integer, or exact in float32, any order of additions gives its pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def smooth(images: Tensor) -> Tensor:
    """``ImageFilter.SMOOTH``: (sum of the 3 x 3 neighborhood + 4 * center) / 13, rounded.

    Args:
        images: uint8 (N, C, H, W), contiguous.

    Returns:
        float32 (N, C, H, W) of integers.
    """
    width = images.shape[3]
    pixels = images.view(-1).to(torch.int16)
    total = _three(_three(pixels, 1), width).add_(pixels[width + 1 : -width - 1], alpha=4)
    return _rounded_mean(total, 13, images, 1)


def blur(images: Tensor) -> Tensor:
    """``ImageFilter.BLUR``: the mean of the 16 pixels on the edge of the 5 x 5 neighborhood, rounded.

    Args:
        images: uint8 (N, C, H, W), contiguous.

    Returns:
        float32 (N, C, H, W) of integers.
    """
    width = images.shape[3]
    pixels = images.view(-1).to(torch.int16)
    rows_of_three = _three(pixels, 1)
    inside = _three(rows_of_three, width)[width + 1 : -width - 1]
    rows_of_five = rows_of_three[1:-1] + pixels[:-4]
    rows_of_five.add_(pixels[4:])
    total = _three(rows_of_five, width)
    total = (total[: -2 * width] + rows_of_five[3 * width : -width]).add_(rows_of_five[4 * width :]).sub_(inside)
    return _rounded_mean(total, 16, images, 2)


def _three(values: Tensor, distance: int) -> Tensor:
    """values[i] + values[i + distance] + values[i + 2 * distance] for a flat tensor."""
    return (values[: -2 * distance] + values[distance:-distance]).add_(values[2 * distance :])


def _rounded_mean(total: Tensor, weight: int, images: Tensor, border: int) -> Tensor:
    """The flat sums, which begin at the first inner pixel, divided and rounded; on the border the image's own pixels."""
    filtered = torch.empty_like(images, dtype=torch.float32)
    margin = border * (images.shape[3] + 1)
    torch.floor(total.to(torch.float32).mul_(1 / weight).add_(0.5), out=filtered.view(-1)[margin:-margin])
    height, width = images.shape[2:]
    for depth in range(border):
        rows = slice(depth, None, height - 1 - 2 * depth)  # the row at this depth from the top, and from the bottom
        columns = slice(depth, None, width - 1 - 2 * depth)
        filtered[:, :, rows] = images[:, :, rows]
        filtered[..., columns] = images[..., columns]
    return filtered
