"""CutOut: one gray box per image. A box is (first row, first column, end row, end column), ends exclusive."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from crmatch.augment.kernels.geometry import Floats, to_device
from crmatch.augment.variants import CutOut

GRAY = (127, 127, 127)


def draw_boxes(rule: CutOut, count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw one box per image: the side by the variant's rule, the center uniform.

    Returns:
        int64 (N, 4), boxes inside the image; a side of 0 gives an empty box.
    """
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
    """Squares around the centers, clipped at all borders.

    Args:
        centers: int64 (..., 2), row and column.
        side: int64 (..., 1); 0 gives an empty box.
        height: rows of the image.
        width: columns of the image.

    Returns:
        int64 (..., 4).
    """
    begin = centers - side // 2
    end = torch.minimum(begin + side, torch.tensor([height, width]))
    return torch.cat((begin.clamp(min=0), end), dim=-1)


def centered_boxes(fractions: Floats, height: int, width: int) -> Tensor:
    """Boxes in the middle of the image, of a fraction of its shorter side: int64 (N, 4)."""
    side = torch.from_numpy(np.floor(fractions * min(height, width)).astype(np.int64))[:, None]
    return clipped_boxes(torch.tensor([[height // 2, width // 2]]).expand(len(side), -1), side, height, width)


def cut_out_(images: Tensor, boxes: Tensor, color: tuple[int, int, int] = GRAY) -> Tensor:
    """Fill each image's box, in place.

    Args:
        images: uint8 (N, C, H, W).
        boxes: int64 (N, 4) on the CPU.
        color: of the boxes; gray images get its luma.

    Returns:
        `images`.
    """
    count, channels, height, width = images.shape
    top, left, bottom, right = boxes.numpy(force=True).T[:, :, None]
    row, column = np.arange(height), np.arange(width)
    # One line per image that is 0 inside the box and 255 outside, and one that is 255 all over; each row picks its line.
    lines = np.full((count + 1, width), 255, dtype=np.uint8)
    lines[:-1] = ((column >= left) & (column < right)).view(np.uint8) - 1
    picks = np.where((row >= top) & (row < bottom), np.arange(count)[:, None], count)
    outside = to_device(lines, images.device).index_select(0, to_device(picks.reshape(-1), images.device))
    outside = outside.view(count, 1, height, width)
    images.bitwise_and_(outside)
    levels = color if channels == 3 and len(set(color)) > 1 else (_luma(color),)
    fill = to_device(np.array(levels, dtype=np.uint8)[:, None, None], images.device)
    return images.bitwise_or_(outside.bitwise_not_() & fill)


def _luma(color: tuple[int, int, int]) -> int:
    red, green, blue = color
    return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
