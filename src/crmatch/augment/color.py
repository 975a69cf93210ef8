"""Point operations on uint8 images (N, C, H, W), with Pillow's own rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def blend_(base: Tensor, pixels: Tensor, factors: Tensor) -> Tensor:
    """Pillow's ``Image.blend`` in place: base + factor * (pixel - base) in float32."""
    return pixels.sub_(base).mul_(factors).add_(base)


def to_bytes(pixels: Tensor) -> Tensor:
    """Float pixels clipped to 0..255 and truncated, as Pillow stores a blend; changes `pixels`.

    The way over int16 is several times faster than a direct conversion.
    """
    return pixels.clamp_(0, 255).to(torch.int16).to(torch.uint8)


def luma(pixels: Tensor) -> Tensor:
    """Pillow's conversion to mode L: (19595 R + 38470 G + 7471 B + 32768) >> 16; gray images stay as they are.

    All sums stay below 2^24, so float32 is exact.

    Args:
        pixels: float32 (N, C, H, W) of integers, C of 1 or 3.

    Returns:
        float32 (N, 1, H, W) of integers.
    """
    if pixels.shape[1] == 1:
        return pixels.clone()
    red, green, blue = pixels.split(1, dim=1)
    total = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return total.add_(32768).mul_(2**-16).floor_()


def mean_luma(pixels: Tensor) -> Tensor:
    """int(mean luma + 0.5) of each image, as ``ImageEnhance.Contrast`` rounds it: float32 (N, 1, 1, 1)."""
    totals = luma(pixels).sum((2, 3), keepdim=True, dtype=torch.float64)
    return totals.div_(pixels.shape[2] * pixels.shape[3]).add_(0.5).floor_().to(torch.float32)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """``ImageOps.posterize``: keep the first int(bits) bits."""
    masks = 256 - torch.bitwise_left_shift(1, 8 - bits.to(torch.int64))
    return images & masks.to(torch.uint8).to(images.device)[:, None, None, None]


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """``ImageOps.solarize``: invert the values that are not below the threshold.

    The sign of threshold - 1 - pixel, spread over all bits, is the mask of what to invert.
    """
    limits = thresholds.ceil().sub_(1).to(torch.int16).to(images.device)[:, None, None, None]
    return (limits - images).bitwise_right_shift_(15).to(torch.uint8).bitwise_xor_(images)


def look_up(positions: Tensor, tables: Tensor) -> Tensor:
    """Replace every pixel value by its entry.

    Args:
        positions: int64 (N, C, H * W), the pixel values.
        tables: uint8 (N, C, 256).

    Returns:
        uint8 (N, C, H * W).
    """
    return tables.gather(2, positions)


def autocontrast_tables(values: Tensor) -> Tensor:
    """``ImageOps.autocontrast``: int(i * scale - low * scale) with scale = 255 / (high - low), in float64.

    A channel with a single value stays as it is.

    Args:
        values: uint8 (N, C, H * W).

    Returns:
        uint8 (N, C, 256).
    """
    low, high = values.amin(2, keepdim=True), values.amax(2, keepdim=True)
    constant = low == high
    span = (high - low).to(torch.float64).masked_fill_(constant, 255)
    low = low.to(torch.float64).masked_fill_(constant, 0)
    scale = torch.full_like(span, 255) / span  # `255 / span` would be 255 * reciprocal, rounded twice
    levels = torch.arange(256, dtype=torch.float64, device=values.device)
    return to_bytes((levels * scale).sub_(low * scale))


def equalize_tables(values: Tensor, positions: Tensor) -> Tensor:
    """``ImageOps.equalize``: (step // 2 + number of darker pixels) // step, at most 255.

    step = (pixels - pixels of the brightest value) // 255; a channel with step 0 stays as it is. Quotients are exact in
    float32, because all numbers are below 2^20.

    Args:
        values: uint8 (N, C, H * W).
        positions: int64 (N, C, H * W), the same values.

    Returns:
        uint8 (N, C, 256).
    """
    ones = torch.ones_like(positions, dtype=torch.int32)
    histograms = torch.zeros(*values.shape[:2], 256, dtype=torch.int32, device=values.device)
    histograms.scatter_add_(2, positions, ones)
    brightest = histograms.gather(2, values.amax(2, keepdim=True).long())
    step = (values.shape[2] - brightest).div_(255, rounding_mode="floor")
    darker = histograms.cumsum(2, dtype=torch.int32) - histograms
    darker.add_(step.bitwise_right_shift(1))
    levels = torch.arange(256, dtype=torch.int32, device=values.device)
    unchanged = step == 0
    numerators = torch.where(unchanged, levels, darker).to(torch.float32)
    return to_bytes(numerators.div_(step.masked_fill_(unchanged, 1)))
