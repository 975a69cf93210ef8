"""CutOut: one gray box per image. A box is (first row, first column, end row, end column), ends exclusive."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from crmatch.augment.kernels.geometry import to_device
from crmatch.augment.variants import CutOut

GRAY = (127, 127, 127)


def draw_boxes(rule: CutOut, count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw one box inside each image, int64 (N, 4): a side according to `rule`, 0 for an empty box, and a uniform center."""
    strength = torch.rand(count, 3, generator=generator, dtype=torch.float64)
    size = torch.tensor([height, width])
    if rule.end_included:
        fraction = rule.smallest + (rule.largest - rule.smallest) * strength[:, :1]
        side = torch.full_like(fraction, rule.pixels) if rule.pixels else fraction * width
        begin = (strength[:, 1:] * size - side / 2).clamp_(min=0).floor_()
        end = torch.minimum(torch.where(side > 0, (begin + side).floor_() + 1, begin), size)
        return torch.cat((begin, end), dim=1).long()
    side_pixels = torch.tensor([rule.pixels or int(rule.largest * min(height, width))])
    return clipped_boxes((strength[:, 1:] * size).long(), side_pixels, height, width)


def clipped_boxes(centers: Tensor, side: Tensor, height: int, width: int) -> Tensor:
    """Squares around int64 `centers` (..., 2), clipped to the image: int64 (..., 4). `side` is int64 (..., 1)."""
    begin = centers - side // 2
    end = torch.minimum(begin + side, torch.tensor([height, width]))
    return torch.cat((begin.clamp(min=0), end), dim=-1)


def cut_out_(images: Tensor, boxes: Tensor, color: tuple[int, int, int] = GRAY) -> Tensor:
    """Fill the box of each image, uint8 (N, C, H, W), in place and return `images`.

    `boxes` are int64 (N, 4) on the CPU; in gray images they get the luma of `color`.
    """
    count, channels, height, width = images.shape
    top, left, bottom, right = boxes.numpy(force=True).T[:, :, None]
    row, column = np.arange(height), np.arange(width)
    # `lines` has one row of pixels per image, 0 inside the box and 255 outside, and a last one that is 255 everywhere.
    # Each row of an image picks one of these two lines, which gives the mask without an (N, H, W) comparison.
    lines = np.full((count + 1, width), 255, dtype=np.uint8)
    lines[:-1] = ((column >= left) & (column < right)).view(np.uint8) - 1
    picks = np.where((row >= top) & (row < bottom), np.arange(count)[:, None], count)
    outside = to_device(lines, images.device).index_select(0, to_device(picks.reshape(-1), images.device))
    outside = outside.view(count, 1, height, width)
    images.bitwise_and_(outside)
    red, green, blue = color
    gray = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16  # Pillow's luma
    # One level for all channels, if that is enough, makes the last mask a third as large.
    levels = color if channels == 3 and len(set(color)) > 1 else (gray,)
    fill = to_device(np.array(levels, dtype=np.uint8)[:, None, None], images.device)
    return images.bitwise_or_(outside.bitwise_not_() & fill)
