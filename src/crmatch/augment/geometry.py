"""Warps: nearest-neighbor resampling with Pillow's own arithmetic, and the weak view's crop and mirror.

Images flow in and out as uint8 (N, C, H, W). A warp is given as the inverse matrix (a, b, c, d, e, f) that Pillow takes:
output pixel (x, y) shows input pixel (a x + b y + c, d x + e y + f), and black where that lies outside.

Whatever moves whole rows (crop, mirror, shear_x, translations) copies rows instead of pixels: the rows are laid out in
one buffer with what lies left and right of them, and each output row is the window of W bytes that begins at its place.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_ONE = 1 << 16  # 1 in 16.16 fixed point


class _Tables(NamedTuple):
    """Where pixels come from, in 16.16 fixed point: column (columns[x] + down[y]) >> 16, row (rows[y] + across[x]) >> 16.

    Attributes:
        columns: int32 (N, W).
        rows: int32 (N, H).
        down: int32 (N, H).
        across: int32 (N, W).
    """

    columns: Tensor
    rows: Tensor
    down: Tensor
    across: Tensor


def crop_and_mirror(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    mirrored: Tensor,
    padding: int,
    mode: Literal["reflect", "zero"] = "reflect",
) -> Tensor:
    """Pad by `padding`, crop back to the old size at (top, left), then mirror some images.

    Equals ``np.pad(image, padding, mode)``, a slice and ``np.fliplr``.

    Args:
        images: uint8 (N, C, H, W).
        top: int64 (N,), first row of the crop in the padded image, 0..2 * padding.
        left: int64 (N,), first column.
        mirrored: bool (N,), which images are mirrored left to right.
        padding: pixels added on each side; less than the shorter side with ``reflect``.
        mode: ``reflect`` repeats the image without its edge pixel, ``zero`` is black.

    Returns:
        uint8 (N, C, H, W), contiguous.
    """
    count, channels, height, width = images.shape
    if mode == "zero":
        padded = F.pad(images, (padding,) * 4)
        lines = torch.cat((padded, padded.flip(3)), dim=3)
        first = torch.where(mirrored, width + 4 * padding - left, left)
        source_rows = torch.arange(height) + torch.arange(2 * padding + 1)[:, None]
    elif mode == "reflect" and padding < min(height, width):
        # Each line is r[W-1] .. r[1] r[0] r[1] .. r[W-1] .. r[1] r[0], so it holds every window of both directions.
        lines = images.new_empty(count, channels, height, 3 * width - 2)
        backward = images.flip(3)
        lines[..., :width] = backward
        lines[..., 2 * width - 2 :] = backward
        lines[..., width - 1 : 2 * width - 1] = images
        offset = left - padding
        first = (width - 1) + torch.where(mirrored, torch.where(offset > 0, width - 1, 1 - width) - offset, offset)
        source_rows = torch.arange(height) + torch.arange(-padding, padding + 1)[:, None]
        source_rows = (height - 1) - ((height - 1) - source_rows.abs()).abs()
    else:
        raise ValueError(
            f"cannot pad {height} x {width} pixels by {padding} with mode {mode!r}; "
            f"use mode 'zero', or 'reflect' with at most {min(height, width) - 1}"
        )
    lines_per_plane, line = lines.shape[2:]
    planes = torch.arange(count * channels).view(count, channels, 1) * (lines_per_plane * line)
    starts = (planes + first[:, None, None]) + (source_rows * line)[top][:, None]
    return _windows(lines, starts, width)


def inverse_matrices(
    angle: Tensor, shear: Tensor, move: Tensor, scale: Tensor, height: int, width: int
) -> Tensor:
    """Inverse matrices, with the roundings of ``Image.rotate`` and of torchvision's ``affine``.

    For one transformation at a time, the others being neutral: a = e = cos / scale, b = shear_x - sin, d = shear_y + sin;
    the center stays in place under rotation and scaling.

    Args:
        angle: float64 (N,), degrees counterclockwise.
        shear: float64 (2, N), columns per row and rows per column.
        move: float64 (2, N), columns and rows.
        scale: float64 (N,), factor.
        height: rows of the image.
        width: columns of the image.

    Returns:
        float64 (6, N).
    """
    radians = torch.deg2rad(-torch.remainder(angle, 360.0))
    sin = torch.round(radians.sin(), decimals=15)
    cos = torch.round(radians.cos(), decimals=15) / scale
    x, y = width / 2, height / 2
    return torch.stack(
        (
            cos,
            shear[0] + sin,
            (cos * -x + sin * -y) + x + move[0],
            shear[1] - sin,
            cos,
            (-sin * -x + cos * -y) + y + move[1],
        )
    )


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Show each image through its inverse matrix, with nearest neighbors and black outside.

    Args:
        images: uint8 (N, C, H, W).
        matrices: float64 (6, N) on the CPU.

    Returns:
        uint8 (N, C, H, W), contiguous.
    """
    count, channels, height, width = images.shape
    # The images get a black frame; everything outside is read there.
    columns, rows, down, across = (table.to(images.device) for table in _tables(matrices, height, width))
    source = torch.add(columns[:, None, :], down[:, :, None]).bitwise_right_shift_(16).clamp_(-1, width)
    source_rows = torch.add(rows[:, :, None], across[:, None, :]).bitwise_right_shift_(16).clamp_(-1, height)
    source.add_(source_rows, alpha=width + 2).add_(width + 3)
    framed = F.pad(images, (1, 1, 1, 1)).flatten(2)
    positions = source.view(count, 1, -1).long().expand(-1, channels, -1)
    return framed.gather(2, positions).view(images.shape)


def slide(images: Tensor, matrices: Tensor) -> Tensor:
    """`warp` for matrices with a = e = 1 and d = 0, which only move rows up, down and sideways."""
    count, channels, height, width = images.shape
    columns, rows, down, _ = _tables(matrices, height, width)
    if not torch.equal(columns[:, -1] - columns[:, 0], torch.full((count,), (width - 1) * _ONE, dtype=torch.int32)):
        return warp(images, matrices)  # a float64 sum of ones jumped over an integer, so columns are not consecutive
    shifts = (columns[:, :1] + down).bitwise_right_shift_(16).clamp_(-width, width).long()
    source_rows = rows.bitwise_right_shift(16).long()
    shifts[(source_rows < 0) | (source_rows >= height)] = -width
    # Between any two rows there are W black pixels.
    lines = images.new_zeros(count * channels * height * 2 * width + width)
    lines[:-width].view(-1, 2 * width)[:, width:] = images.reshape(-1, width)
    planes = torch.arange(count * channels).view(count, channels, 1) * (height * 2 * width)
    starts = planes + (source_rows.clamp_(0, height - 1).mul_(2 * width) + shifts + width)[:, None]
    return _windows(lines, starts, width)


def _windows(lines: Tensor, starts: Tensor, width: int) -> Tensor:
    flat = lines.view(-1)
    windows = flat.as_strided((flat.numel() - width + 1, width), (1, 1))
    return windows.index_select(0, starts.view(-1).to(lines.device)).view(*starts.shape, width)


def _tables(matrices: Tensor, height: int, width: int) -> _Tables:
    """Pillow's two ways to step through a row: in float64 if b = d = 0, else in 16.16 fixed point."""
    a, b, c, d, e, f = matrices
    fixed = torch.stack((a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5)).mul_(_ONE).add_(0.5).floor_()
    fixed_a, fixed_b, fixed_c, fixed_d, fixed_e, fixed_f = fixed.to(torch.int32)[:, :, None]
    x, y = torch.arange(width, dtype=torch.int32), torch.arange(height, dtype=torch.int32)
    columns, rows = fixed_c + fixed_a * x, fixed_f + fixed_e * y
    upright = (b == 0) & (d == 0)
    if bool(upright.any()):
        columns[upright] = _summed(a[upright], c[upright], width)
        rows[upright] = _summed(e[upright], f[upright], height)
    return _Tables(columns, rows, fixed_b * y, fixed_d * x)


def _summed(step: Tensor, offset: Tensor, size: int) -> Tensor:
    steps = step[:, None].repeat(1, size)
    steps[:, 0] = offset + step * 0.5
    return steps.cumsum(1).floor_().clamp_(-size, 2 * size).to(torch.int32).mul_(_ONE)
