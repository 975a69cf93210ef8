"""Nearest-neighbor warps with Pillow's own arithmetic, and the weak view's crop and mirror.

Images are uint8 (N, C, H, W) tensors; the few numbers that say where their pixels come from are NumPy arrays. A warp is given
by Pillow's inverse matrix (a, b, c, d, e, f): output pixel (x, y) shows input pixel (a x + b y + c, d x + e y + f), or black if
that lies outside the image.

Operations that move whole rows (crop, mirror, shear_x, translations) copy rows instead of pixels, which is much faster than a
gather: the rows and what lies beside them are laid out in one buffer, and each output row is a window of W bytes of it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_ONE = 1 << 16  # 1 in 16.16 fixed point


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Move a NumPy array to `device`; the copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def crop_and_mirror(
    images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor, padding: int, mode: Literal["reflect", "zero"] = "reflect"
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
    images = images.contiguous()
    count, channels, height, width = images.shape
    row_offsets, offsets = torch.stack((top, left)).numpy(force=True)[:, :, None] - padding
    rows = row_offsets + np.arange(height)
    if mode == "reflect":
        # A line is r[W-1] .. r[1] r[0] r[1] .. r[W-1] .. r[1] r[0], which contains all crops of a row and their mirror images.
        lines = images.new_empty(count, channels, height, 3 * width - 2)
        lines[..., :width] = backward = images.flip(3)
        lines[..., 2 * width - 2 :] = backward
        lines[..., width - 1 : 2 * width - 1] = images
        rows = (height - 1) - np.abs((height - 1) - np.abs(rows))
        plain_start, mirrored_start = width - 1 + offsets, np.where(offsets > 0, 2 * width - 2, 0) - offsets
    else:
        # A line is a row in a black frame, followed by its mirror image.
        framed = functional.pad(images, (padding,) * 4)
        lines = torch.cat((framed, framed.flip(3)), dim=3)
        rows += padding
        plain_start, mirrored_start = padding + offsets, width + 3 * padding - offsets
    starts = rows * lines.shape[3] + np.where(mirrored.numpy(force=True)[:, None], mirrored_start, plain_start)
    return _windows(lines, starts, channels, lines.shape[2] * lines.shape[3], width)


def inverse_matrices(
    height: int,
    width: int,
    rotate: Floats | float = 0.0,
    shear_x: Floats | float = 0.0,
    shear_y: Floats | float = 0.0,
    translate_x: Floats | float = 0.0,
    translate_y: Floats | float = 0.0,
    scale: Floats | float = 1.0,
) -> Floats:
    """Inverse matrices (6, N) of affine operations, with the roundings of ``Image.rotate`` and torchvision's ``affine``.

    Each image has one operation with a value (N,); the others have their neutral values. Units are those of the table of
    operations. a = e = cos / scale, b = shear_x + sin and d = shear_y - sin of the clockwise angle; rotation and scaling keep
    the center in place.
    """
    radians = -np.radians(np.asarray(rotate) % 360.0)
    # NumPy's sine may differ from Python's in the last bit; rounding to 15 digits, as Pillow does, removes the difference.
    sin, cos = np.round(np.sin(radians), 15), np.round(np.cos(radians), 15) / scale
    x, y = width / 2, height / 2
    c = (cos * -x + sin * -y) + x + translate_x * width
    f = (-sin * -x + cos * -y) + y + translate_y * height
    return np.stack(np.broadcast_arrays(cos, shear_x + sin, c, shear_y - sin, cos, f))


def warp(images: Tensor, matrices: Floats) -> Tensor:
    """Show each image through its inverse matrix, with nearest neighbors and black outside.

    In 16.16 fixed point the source column is (columns[x] + down[y]) >> 16 and the source row (rows[y] + across[x]) >> 16.
    `images` are uint8 (N, C, H, W), `matrices` are (6, N); the result is contiguous.
    """
    count, channels, height, width = images.shape
    a, b, c, d, e, f = matrices[:, :, None]
    fixed_a, fixed_b, fixed_c, fixed_d, fixed_e, fixed_f = to_fixed_point(
        np.stack((a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5))
    )
    x, y = np.arange(width, dtype=np.int32), np.arange(height, dtype=np.int32)
    columns, rows = fixed_c + fixed_a * x, fixed_f + fixed_e * y
    upright = ((b == 0) & (d == 0))[:, 0]
    if upright.any():  # without shear and rotation Pillow adds up coordinates in float64
        columns[upright] = _summed(a[upright], c[upright], width)
        rows[upright] = _summed(e[upright], f[upright], height)
    # The images get a black frame of one pixel; every position outside the image is clamped to it.
    device = images.device
    source = to_device((columns + _ONE)[:, None, :], device) + to_device((fixed_b * y)[:, :, None], device)
    source_rows = to_device((rows + _ONE)[:, :, None], device) + to_device((fixed_d * x)[:, None, :], device)
    source.bitwise_right_shift_(16).clamp_(0, width + 1)
    source.add_(source_rows.bitwise_right_shift_(16).clamp_(0, height + 1), alpha=width + 2)
    framed = functional.pad(images, (1, 1, 1, 1)).view(count, channels, -1)
    positions = source.view(count, 1, -1).long().expand(-1, channels, -1)
    return framed.gather(2, positions).view(images.shape)


def slide(images: Tensor, rows: Integers, shifts: Integers) -> Tensor:
    """Move rows: output row y shows input row rows[y] from column shifts[y] on, and black outside the image.

    `images` are contiguous uint8 (N, C, H, W), `rows` and `shifts` are (N, H); the result is contiguous, too.
    """
    count, channels, height, width = images.shape
    # Between any two rows there are W black pixels, and below each plane one black row, which is also above the next.
    lines = images.new_zeros((count * channels * (height + 1) + 1) * 2 * width + width)
    planes = lines[2 * width : -width].view(count * channels, height + 1, 2 * width)
    planes[:, :-1, width:] = images.view(count * channels, height, width)
    rows = np.minimum(np.maximum(rows, -1), height)
    shifts = np.minimum(np.maximum(shifts, -width), width)
    starts = (rows + 1) * (2 * width) + (shifts + width)
    return _windows(lines, starts, channels, (height + 1) * 2 * width, width)


def to_fixed_point(values: Floats) -> NDArray[np.int32]:
    """Convert to 16.16 fixed point, rounded as Pillow rounds."""
    return np.floor(values * _ONE + 0.5).astype(np.int32)


def _windows(lines: Tensor, starts: Integers, channels: int, plane: int, width: int) -> Tensor:
    """Copy rows of `width` bytes: `starts` (N, H) holds their places in the first channel, the next is `plane` bytes on."""
    count, height = starts.shape
    planes = np.arange(count * channels).reshape(count, channels, 1) * plane
    flat = lines.view(-1)
    windows = flat.as_strided((flat.numel() - width + 1, width), (1, 1))
    chosen = to_device((planes + starts[:, None]).reshape(-1), lines.device)
    return windows.index_select(0, chosen).view(count, channels, height, width)


def _summed(step: Floats, offset: Floats, size: int) -> NDArray[np.int32]:
    steps = np.repeat(step, size, axis=1)
    steps[:, :1] = offset + step * 0.5
    return (np.clip(np.floor(np.cumsum(steps, axis=1)), -1, size) * _ONE).astype(np.int32)
