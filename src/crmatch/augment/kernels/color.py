"""Color operations and small blur filters on uint8 images (N, C, H, W), with Pillow's own rounding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from crmatch.augment.kernels.geometry import Floats, to_device


def to_bytes(pixels: Tensor) -> Tensor:
    """Clip float pixels to 0..255 and truncate them, as Pillow stores a blend. Overwrites `pixels`."""
    return pixels.clamp_(0, 255).to(torch.int16).to(torch.uint8)  # several times faster than float to uint8 directly


def luma(pixels: Tensor) -> Tensor:
    """Pillow's conversion to mode L: (19595 R + 38470 G + 7471 B + 32768) >> 16. Gray images are copied.

    float32 (N, C, H, W) with C of 1 or 3 -> float32 (N, 1, H, W), both with integer values.
    """
    if pixels.shape[1] == 1:
        return pixels.clone()
    red, green, blue = pixels[:, 0:1], pixels[:, 1:2], pixels[:, 2:3]
    total = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)  # below 2^24, so float32 is exact
    return total.add_(32768).mul_(2**-16).floor_()


def mean_luma(pixels: Tensor) -> Tensor:
    """The gray level that ``ImageEnhance.Contrast`` blends with: int(mean luma + 0.5), float32 (N, 1, 1, 1)."""
    gray = luma(pixels)
    totals = gray.sum((1, 2, 3), keepdim=True, dtype=torch.float64)
    return totals.div_(gray[0].numel()).add_(0.5).floor_().to(torch.float32)


def posterize(images: Tensor, bits: Floats) -> Tensor:
    """``ImageOps.posterize``: keep the first int(bits) bits; `bits` is (N,)."""
    masks = 256 - (1 << (8 - bits.astype(np.int64)))
    return images & to_device(masks.astype(np.uint8)[:, None, None, None], images.device)


def solarize(images: Tensor, thresholds: Floats) -> Tensor:
    """``ImageOps.solarize``: invert all values that are not below the threshold; `thresholds` is (N,)."""
    limits = to_device((np.ceil(thresholds) - 1).astype(np.int16)[:, None, None, None], images.device)
    # ceil(threshold) - 1 - pixel is negative where the pixel is inverted; its sign bit, shifted over all bits, is the mask.
    return (limits - images).bitwise_right_shift_(15).to(torch.uint8).bitwise_xor_(images)


def autocontrast(images: Tensor) -> Tensor:
    """``ImageOps.autocontrast``: int(pixel * scale - low * scale) with scale = 255 / (high - low), in float64.

    A channel with a single value is unchanged.
    """
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    constant = low == high
    span = (high - low).to(torch.float64).masked_fill_(constant, 255)
    low = low.to(torch.float64).masked_fill_(constant, 0)
    scale = torch.full_like(span, 255) / span  # `255 / span` would be 255 * reciprocal, rounded twice
    return images.to(torch.float64).mul_(scale).sub_(low * scale).to(torch.int16).to(torch.uint8)


def equalize(images: Tensor) -> Tensor:
    """``ImageOps.equalize``: each pixel becomes (step // 2 + number of darker pixels) // step, at most 255.

    step = (pixels - pixels of the brightest value) // 255, per channel; a channel with step 0 is unchanged. All numbers
    are integers below 2^20, for which float32 gives exact sums and exact integer parts of quotients.
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


def smooth(images: Tensor) -> Tensor:
    """``ImageFilter.SMOOTH``: (sum of the 3 x 3 neighborhood + 4 * center) / 13, rounded.

    Contiguous (N, C, H, W) of any type -> float32 (N, C, H, W), both with integer values; the border keeps its pixels.
    """
    width = images.shape[3]
    pixels = images.view(-1).to(torch.int16)
    total = _sum_of_three(_sum_of_three(pixels, 1), width).add_(pixels[width + 1 : -width - 1], alpha=4)
    return _rounded_quotient(total, 13, images, 1)


def blur(images: Tensor) -> Tensor:
    """``ImageFilter.BLUR``: the mean of the 16 pixels on the edge of the 5 x 5 neighborhood; shapes as in `smooth`."""
    width = images.shape[3]
    pixels = images.view(-1).to(torch.int16)
    rows_of_three = _sum_of_three(pixels, 1)
    inside = _sum_of_three(rows_of_three, width)[width + 1 : -width - 1]
    rows_of_five = rows_of_three[1:-1] + pixels[:-4]
    rows_of_five.add_(pixels[4:])
    total = _sum_of_three(rows_of_five, width)
    total = (total[: -2 * width] + rows_of_five[3 * width : -width]).add_(rows_of_five[4 * width :]).sub_(inside)
    return _rounded_quotient(total, 16, images, 2)


# The filters add over the flat memory of the whole batch, which is fast. Sums across the edge of an image land on its
# border, which is overwritten. Pillow adds float32 products and 0.5, then truncates: the exact values are either exact in
# float32 or farther from an integer than its rounding error, so any order of additions gives Pillow's pixels.
def _sum_of_three(values: Tensor, distance: int) -> Tensor:
    """values[i] + values[i + distance] + values[i + 2 * distance] for a flat tensor."""
    return (values[: -2 * distance] + values[distance:-distance]).add_(values[2 * distance :])


def _rounded_quotient(total: Tensor, weight: int, images: Tensor, border: int) -> Tensor:
    """Divide and round flat sums that begin at the first inner pixel; the border is copied from `images`."""
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


def hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the hue like torchvision's ``adjust_hue``: RGB to Pillow's HSV in bytes, H + int(shift * 255) modulo 256, and back.

    Pillow mixes float32 variables with float64 constants; this code makes the same conversions. `images` are uint8
    (N, 3, H, W), like the result; `shifts` are (N, 1, 1), from -0.5 to 0.5.
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
    """Pillow's conversion of float64 (N, H, W) with integer values to uint8 (N, 3, H, W)."""
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
