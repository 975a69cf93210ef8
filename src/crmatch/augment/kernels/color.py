"""Point operations on uint8 images (N, C, H, W), with Pillow's own rounding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from crmatch.augment.kernels.geometry import Floats, to_device


def mix_(pixels: Tensor, other: Tensor, shares: Tensor) -> Tensor:
    """``Image.blend(image, other, share)`` in place of the image: pixel + share * (other - pixel) in float32."""
    return pixels.add_((other - pixels).mul_(shares))


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
    red, green, blue = pixels[:, 0:1], pixels[:, 1:2], pixels[:, 2:3]
    total = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return total.add_(32768).mul_(2**-16).floor_()


def rounded_mean(values: Tensor) -> Tensor:
    """int(mean + 0.5) of each image, as ``ImageEnhance.Contrast`` takes it: float32 (N, 1, 1, 1)."""
    totals = values.sum((1, 2, 3), keepdim=True, dtype=torch.float64)
    return totals.div_(values[0].numel()).add_(0.5).floor_().to(torch.float32)


def posterize(images: Tensor, bits: Floats) -> Tensor:
    """``ImageOps.posterize``: keep the first int(bits) bits; `bits` is (N,)."""
    masks = 256 - (1 << (8 - bits.astype(np.int64)))
    return images & to_device(masks.astype(np.uint8)[:, None, None, None], images.device)


def solarize(images: Tensor, thresholds: Floats) -> Tensor:
    """``ImageOps.solarize``: invert the values that are not below the threshold; `thresholds` is (N,).

    The sign of ceil(threshold) - 1 - pixel, spread over all bits, is the mask of what to invert.
    """
    limits = to_device((np.ceil(thresholds) - 1).astype(np.int16)[:, None, None, None], images.device)
    return (limits - images).bitwise_right_shift_(15).to(torch.uint8).bitwise_xor_(images)


def autocontrast(images: Tensor) -> Tensor:
    """``ImageOps.autocontrast``: int(pixel * scale - low * scale) with scale = 255 / (high - low), in float64.

    A channel with a single value stays as it is.
    """
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    constant = low == high
    span = (high - low).to(torch.float64).masked_fill_(constant, 255)
    low = low.to(torch.float64).masked_fill_(constant, 0)
    scale = torch.full_like(span, 255) / span  # `255 / span` would be 255 * reciprocal, rounded twice
    return images.to(torch.float64).mul_(scale).sub_(low * scale).to(torch.int16).to(torch.uint8)


def equalize(images: Tensor) -> Tensor:
    """``ImageOps.equalize``: each pixel becomes (step // 2 + number of darker pixels) // step, at most 255.

    step = (pixels - pixels of the brightest value) // 255, per channel; a channel with step 0 stays as it is. All numbers
    are integers below 2^20, for which float32 gives exact sums and exact whole parts of quotients.
    """
    count, channels, height, width = images.shape
    values = images.view(count, channels, height * width)
    positions = values.long()
    histograms = torch.zeros(count, channels, 256, dtype=torch.float32, device=images.device)
    histograms.scatter_add_(2, positions, torch.ones_like(positions, dtype=torch.float32))
    brightest = histograms.gather(2, values.amax(2, keepdim=True).long())
    step = brightest.neg_().add_(height * width).div_(255).floor_()
    tables = histograms.cumsum(2).sub_(histograms).add_((step / 2).floor_()).div_(step)
    levels = torch.arange(256, dtype=torch.float32, device=images.device)
    tables = to_bytes(torch.where(step == 0, levels, tables))
    return tables.gather(2, positions).view(images.shape)


def hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Hue as torchvision's ``adjust_hue`` turns it: RGB to Pillow's HSV of bytes, H + int(shift * 255) modulo 256, and back.

    Pillow mixes float32 variables and float64 constants; so does this.

    Args:
        images: uint8 (N, 3, H, W).
        shifts: (N, 1, 1), from -0.5 to 0.5.

    Returns:
        uint8 (N, 3, H, W).
    """
    red, green, blue = images.to(torch.float32).unbind(1)
    value, lowest = images.amax(1), images.amin(1)
    brightest = value.to(torch.float32)
    chroma = (brightest - lowest.to(torch.float32)).clamp_(min=1)
    from_red, from_green, from_blue = ((brightest - channel) / chroma for channel in (red, green, blue))
    sixth = torch.where(
        red == brightest,
        (from_blue - from_green).double(),
        torch.where(green == brightest, 2.0 + from_red.double() - from_blue, 4.0 + from_green.double() - from_red),
    ).float()
    turn = (sixth.double() / 6.0 + 1.0).fmod_(1.0).float()
    gray = value == lowest
    hues = (turn.double() * 255.0).trunc_().masked_fill_(gray, 0)
    saturation = (chroma / brightest.clamp(min=1)).double().mul_(255.0).trunc_().masked_fill_(gray, 0)
    turned = (hues + (shifts * 255).trunc()).remainder_(256)
    return _hsv_to_rgb(turned, saturation, value.double())


def _hsv_to_rgb(hues: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Pillow's conversion of float64 (N, H, W) of integers to uint8 (N, 3, H, W)."""
    position = hues * 6.0 / 255.0
    sector = position.floor()
    fraction = (position - sector).float()
    strength = (saturation / 255.0).float()
    low = (value * (1.0 - strength.double())).add_(0.5).floor_()
    falling = (value * (1.0 - (strength * fraction).double())).add_(0.5).floor_()
    rising = (value * (1.0 - strength.double() * (1.0 - fraction.double()))).add_(0.5).floor_()
    choices = torch.stack((value, rising, falling, low)).to(torch.uint8)
    # Row s: which of (value, rising, falling, low) red, green and blue take in sector s of the color circle.
    roles = np.array([[0, 1, 3], [2, 0, 3], [3, 0, 1], [3, 2, 0], [1, 3, 0], [0, 3, 2]])
    chosen = to_device(roles, hues.device)[sector.long() % 6].movedim(-1, 0)
    return choices.gather(0, chosen).transpose(0, 1).contiguous()
