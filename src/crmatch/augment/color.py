"""Point operations and blends on uint8 images, with Pillow's own rounding.

Everything that maps a pixel value to a pixel value is a lookup table per image and channel, and all of a batch's tables
are looked up at once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def blend(base: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    """Pillow's ``Image.blend``: base + factor * (image - base) in float32, clipped to 0..255 and truncated.

    Args:
        base: integer-valued tensor that broadcasts with `images`; shown alone at factor 0.
        images: uint8 (N, C, H, W) or tables (N, C, 256).
        factors: float (N,).

    Returns:
        uint8, shaped like `images`.
    """
    base = base.to(torch.float32)
    factors = factors.to(images.device, torch.float32).view(-1, *[1] * (images.dim() - 1))
    mixed = (images.to(torch.float32) - base).mul_(factors).add_(base)
    return mixed.clamp_(0, 255).to(torch.int16).to(torch.uint8)


def luma(images: Tensor) -> Tensor:
    """Pillow's conversion to mode L: (19595 R + 38470 G + 7471 B + 32768) >> 16; gray images stay as they are.

    Args:
        images: uint8 (N, C, H, W) with C of 1 or 3.

    Returns:
        int32 (N, 1, H, W).
    """
    if images.shape[1] == 1:
        return images.to(torch.int32)
    red, green, blue = images.to(torch.int32).split(1, dim=1)
    return red.mul_(19595).add_(green.mul_(38470)).add_(blue.mul_(7471)).add_(32768).bitwise_right_shift_(16)


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Replace every pixel by its entry.

    Args:
        images: uint8 (N, C, H, W).
        tables: uint8 (N, C, 256).

    Returns:
        uint8 (N, C, H, W).
    """
    return tables.gather(2, images.flatten(2).long()).view(images.shape)


def identity_tables(images: Tensor) -> Tensor:
    """Tables that change nothing: uint8 (N, C, 256)."""
    return torch.arange(256, dtype=torch.uint8, device=images.device).expand(*images.shape[:2], 256)


def autocontrast_tables(images: Tensor) -> Tensor:
    """``ImageOps.autocontrast``: int(i * scale - low * scale) with scale = 255 / (high - low), in float64.

    A channel with a single value stays as it is.
    """
    flat = images.flatten(2)
    low, high = flat.amin(2, keepdim=True), flat.amax(2, keepdim=True)
    constant = low == high
    span = high.double() - low.double() + constant
    scale = torch.full_like(span, 255.0) / span  # `255.0 / span` would be 255 * reciprocal, rounded twice
    levels = torch.arange(256, dtype=torch.float64, device=images.device)
    tables = (levels * scale + -low.double() * scale).clamp_(0, 255).to(torch.uint8)
    return torch.where(constant, identity_tables(images), tables)


def equalize_tables(images: Tensor) -> Tensor:
    """``ImageOps.equalize``: (step // 2 + number of darker pixels) // step, at most 255.

    step = (pixels - pixels of the brightest value) // 255; a channel with step 0 stays as it is.
    """
    count, channels = images.shape[:2]
    rows = count * channels
    offsets = torch.arange(rows, device=images.device, dtype=torch.int32).mul_(256)[:, None]
    histograms = torch.bincount((images.reshape(rows, -1) + offsets).flatten(), minlength=rows * 256)
    histograms = histograms.to(torch.int32).view(rows, 256)
    brightest = images.reshape(rows, -1).amax(1, keepdim=True).long()
    pixels = images.shape[2] * images.shape[3]
    step = (pixels - histograms.gather(1, brightest)) // 255
    darker = histograms.cumsum(1, dtype=torch.int32) - histograms
    tables = ((darker + step // 2) // step.clamp(min=1)).clamp_(max=255).to(torch.uint8)
    tables = tables.view(count, channels, 256)
    return torch.where((step == 0).view(count, channels, 1), identity_tables(images), tables)


def posterize_tables(images: Tensor, bits: Tensor) -> Tensor:
    """``ImageOps.posterize``: keep the first int(bits) bits."""
    masks = 256 - torch.bitwise_left_shift(1, 8 - bits.to(torch.int64))
    return identity_tables(images) & masks.to(torch.uint8).to(images.device)[:, None, None]


def solarize_tables(images: Tensor, thresholds: Tensor) -> Tensor:
    """``ImageOps.solarize``: invert the values that are not below the threshold."""
    levels = identity_tables(images)
    return torch.where(levels < thresholds.to(images.device)[:, None, None], levels, ~levels)


def brightness_tables(images: Tensor, factors: Tensor) -> Tensor:
    """``ImageEnhance.Brightness``: blend with black."""
    levels = identity_tables(images)
    return blend(torch.zeros_like(levels), levels, factors)


def contrast_tables(images: Tensor, factors: Tensor) -> Tensor:
    """``ImageEnhance.Contrast``: blend with the image's mean luma, int(mean + 0.5)."""
    totals = luma(images).sum((1, 2, 3), dtype=torch.int64)
    means = (totals.double() / (images.shape[2] * images.shape[3]) + 0.5).to(torch.int32)
    return blend(means[:, None, None], identity_tables(images), factors)


def invert_tables(images: Tensor) -> Tensor:
    """``ImageOps.invert``: 255 - i."""
    return ~identity_tables(images)
