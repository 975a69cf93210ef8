"""CutOut: one gray box per image."""

from __future__ import annotations

import torch
from torch import Tensor

from crmatch.augment.variants import CutOut


def draw_boxes(cutout: CutOut, count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw one box per image.

    The side is half the shorter side of the image, or what the variant says; the center is uniform.

    Returns:
        int64 (N, 4): first row, first column, end row, end column; ends are exclusive, and the box lies inside the image.
    """
    strength = torch.rand(count, 3, generator=generator, dtype=torch.float64)
    size = torch.tensor([height, width])
    if cutout.end_included:
        fraction = cutout.smallest + (cutout.largest - cutout.smallest) * strength[:, :1]
        side = torch.full_like(fraction, cutout.pixels) if cutout.pixels else fraction * width
        begin = (strength[:, 1:] * size - side / 2).clamp(min=0).floor()
        end = torch.minimum(begin + side, size).floor() + 1
        end = torch.where(side > 0, torch.minimum(end, size), begin)
        return torch.cat((begin, end), 1).long()
    side_pixels = cutout.pixels or int(cutout.largest * min(height, width))
    begin = (strength[:, 1:] * size).floor().long() - side_pixels // 2
    return torch.cat((begin.clamp(min=0), torch.minimum(begin + side_pixels, size)), 1)


def cut_out(images: Tensor, boxes: Tensor, color: tuple[int, int, int]) -> Tensor:
    """Fill each image's box.

    Args:
        images: uint8 (N, C, H, W).
        boxes: int64 (N, 4) on the CPU: first row, first column, end row, end column.
        color: of the boxes; gray images get its luma.

    Returns:
        uint8 (N, C, H, W).
    """
    channels, height, width = images.shape[1:]
    top, left, bottom, right = boxes[:, :, None].unbind(1)
    rows, columns = torch.arange(height), torch.arange(width)
    inside_rows = ((rows >= top) & (rows < bottom)).to(torch.uint8).neg_().to(images.device)
    inside_columns = ((columns >= left) & (columns < right)).to(torch.uint8).neg_().to(images.device)
    inside = (inside_rows[:, :, None] & inside_columns[:, None, :])[:, None]
    red, green, blue = color
    levels = color if channels == 3 else ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16,)
    fill = torch.tensor(levels, dtype=torch.uint8, device=images.device)[:, None, None]
    return (images & ~inside).bitwise_or_(inside & fill)
