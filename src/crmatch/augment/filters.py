"""Pillow's small convolution filters on uint8 images; they leave the border as it is."""

from __future__ import annotations

import torch
from torch import Tensor


def smooth(images: Tensor) -> Tensor:
    """``ImageFilter.SMOOTH``: (sum of the 3 x 3 neighborhood + 4 * center) / 13, rounded.

    Pillow adds up nine float32 products and 0.5, then truncates. The exact value, (2 S + 13) / 26 with an integer S, is
    never nearer than 1/26 to an integer, so any order of additions gives the same pixels.

    Args:
        images: uint8 (N, C, H, W), contiguous.

    Returns:
        float32 (N, C, H, W) of integers.
    """
    width = images.shape[3]
    pixels = images.view(-1).to(torch.int16)
    total = _neighbors(_neighbors(pixels, 1), width).add_(pixels[width + 1 : -width - 1], alpha=4)
    return _with_border(images, total.to(torch.float32).mul_(1 / 13).add_(0.5).floor_(), 1)


def blur(images: Tensor) -> Tensor:
    """``ImageFilter.BLUR``: the mean of the 16 pixels on the edge of the 5 x 5 neighborhood, rounded.

    Args:
        images: uint8 (N, C, H, W), contiguous.

    Returns:
        float32 (N, C, H, W) of integers.
    """
    width = images.shape[3]
    pixels = images.view(-1).to(torch.int16)
    row_of_three = _neighbors(pixels, 1)
    row_of_five = row_of_three[1:-1] + pixels[:-4] + pixels[4:]
    columns = _neighbors(pixels, width)[2:-2]
    total = row_of_five[: -4 * width] + row_of_five[4 * width :]
    sides = columns[: -2 * width]
    raise NotImplementedError


def _neighbors(values: Tensor, distance: int) -> Tensor:
    """values[i] + values[i + distance] + values[i + 2 * distance] for a flat tensor."""
    return (values[: -2 * distance] + values[distance:-distance]).add_(values[2 * distance :])


def _with_border(images: Tensor, inner: Tensor, border: int) -> Tensor:
    """The filtered pixels, and on the border of each image its own; what ran over an edge is overwritten."""
    pixels = images.to(torch.float32)
    filtered = pixels.clone()
    margin = border * (images.shape[3] + 1)
    filtered.view(-1)[margin:-margin] = inner
    for side in (slice(None, border), slice(-border, None)):
        filtered[:, :, side] = pixels[:, :, side]
        filtered[..., side] = pixels[..., side]
    return filtered
