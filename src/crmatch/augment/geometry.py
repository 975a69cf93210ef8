"""Warps: nearest-neighbor resampling with Pillow's own arithmetic, and the weak view's crop and mirror.

Images flow in and out as uint8 (N, C, H, W). A warp is given as the inverse matrix (a, b, c, d, e, f) that Pillow takes:
output pixel (x, y) shows input pixel (a x + b y + c, d x + e y + f), and black where that lies outside.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_mirror(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    mirrored: Tensor,
    padding: int,
    mode: Literal["reflect", "zero"] = "reflect",
) -> Tensor:
    """Pad by `padding`, crop back to the old size at (top, left), then mirror some images.

    Equals ``np.pad(image, padding, mode)``, a slice and ``np.fliplr``, without ever making the padded image.

    Args:
        images: uint8 (N, C, H, W).
        top: int64 (N,), first row of the crop in the padded image, 0..2 * padding.
        left: int64 (N,), first column.
        mirrored: bool (N,), which images are mirrored left to right.
        padding: pixels added on each side; at most the side - 1 with ``reflect``.
        mode: ``reflect`` repeats the image without its edge pixel, ``zero`` is black.

    Returns:
        uint8 (N, C, H, W).
    """
    count, channels, height, width = images.shape
    if mode == "reflect" and padding >= min(height, width):
        raise ValueError(
            f"padding {padding} cannot be reflected in images of {height} x {width} pixels; "
            f"use at most {min(height, width) - 1}, or mode 'zero'"
        )
    rows = torch.arange(height) + (top.cpu() - padding)[:, None]
    columns = torch.arange(width) + (left.cpu() - padding)[:, None]
    columns = torch.where(mirrored.cpu()[:, None], columns.flip(1), columns)
    if mode == "reflect":
        rows = (height - 1) - ((height - 1) - rows.abs()).abs()
        columns = (width - 1) - ((width - 1) - columns.abs()).abs()
        return _gather(images, rows.to(images.device)[:, :, None] * width + columns.to(images.device)[:, None, :])
    framed = F.pad(images, (1, 1, 1, 1))
    rows = rows.clamp(-1, height).add_(1).mul_(width + 2)
    columns = columns.clamp(-1, width).add_(1)
    return _gather(framed, rows.to(images.device)[:, :, None] + columns.to(images.device)[:, None, :])


def inverse_matrices(
    angle: Tensor, shear_x: Tensor, shear_y: Tensor, move_x: Tensor, move_y: Tensor, scale: Tensor, height: int, width: int
) -> Tensor:
    """Inverse matrices, rounded as ``Image.rotate`` and torchvision's ``affine`` round them.

    For one transformation at a time: all other arguments are neutral (0, for `scale` 1), and then
    a = e = cos / scale, b = shear_x - sin, d = shear_y + sin, with the image's center as the fixed point of rotation and
    scaling.

    Args:
        angle: float64 (N,), degrees counterclockwise.
        shear_x: float64 (N,), columns per row.
        shear_y: float64 (N,), rows per column.
        move_x: float64 (N,), columns.
        move_y: float64 (N,), rows.
        scale: float64 (N,), factor.
        height: rows of the image.
        width: columns of the image.

    Returns:
        float64 (N, 6).
    """
    radians = torch.deg2rad(-torch.remainder(angle, 360.0))
    cos, sin = torch.round(radians.cos(), decimals=15), torch.round(radians.sin(), decimals=15)
    cos = cos / scale
    center_x, center_y = width / 2, height / 2
    return torch.stack(
        (
            cos,
            sin + shear_x,
            cos * -center_x + sin * -center_y + center_x + move_x,
            shear_y - sin,
            cos,
            -sin * -center_x + cos * -center_y + center_y + move_y,
        ),
        dim=1,
    )


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Show each image through its inverse matrix, with nearest neighbors and black outside.

    Pillow has two ways, and both are kept: without shear and rotation (b = d = 0) it adds up coordinates in float64,
    otherwise in 16.16 fixed point. In both, the source column is (X[x] + b * y) >> 16 and the source row
    (Y[y] + d * x) >> 16 with one table X and Y per image.

    Args:
        images: uint8 (N, C, H, W).
        matrices: float64 (N, 6) on the CPU.

    Returns:
        uint8 (N, C, H, W).
    """
    height, width = images.shape[2:]
    a, b, c, d, e, f = matrices.unbind(1)
    upright = (b == 0) & (d == 0)
    column_table = torch.where(
        upright[:, None], _summed_positions(a, c, width), _fixed_positions(a, c + a * 0.5 + b * 0.5, width)
    )
    row_table = torch.where(
        upright[:, None], _summed_positions(e, f, height), _fixed_positions(e, f + d * 0.5 + e * 0.5, height)
    )
    down = _fixed(b)[:, None] * torch.arange(height, dtype=torch.int32)
    across = _fixed(d)[:, None] * torch.arange(width, dtype=torch.int32)
    device = images.device
    columns = column_table.to(device)[:, None, :] + down.to(device)[:, :, None]
    rows = row_table.to(device)[:, :, None] + across.to(device)[:, None, :]
    columns.bitwise_right_shift_(16).clamp_(-1, width).add_(1)
    rows.bitwise_right_shift_(16).clamp_(-1, height).add_(1).mul_(width + 2)
    return _gather(F.pad(images, (1, 1, 1, 1)), rows.add_(columns).long())


def _fixed(values: Tensor) -> Tensor:
    return torch.floor(values * 65536.0 + 0.5).to(torch.int32)


def _fixed_positions(step: Tensor, start: Tensor, size: int) -> Tensor:
    return _fixed(start)[:, None] + _fixed(step)[:, None] * torch.arange(size, dtype=torch.int32)


def _summed_positions(step: Tensor, offset: Tensor, size: int) -> Tensor:
    steps = step[:, None].repeat(1, size)
    steps[:, 0] = offset + step * 0.5
    return steps.cumsum(1).floor_().clamp_(-1, size).to(torch.int32).mul_(65536)


def _gather(images: Tensor, positions: Tensor) -> Tensor:
    count, channels = images.shape[:2]
    height, width = positions.shape[1:]
    flat = positions.view(count, 1, height * width).expand(-1, channels, -1)
    return images.reshape(count, channels, -1).gather(2, flat).view(count, channels, height, width)
