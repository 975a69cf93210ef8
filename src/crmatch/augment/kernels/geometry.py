"""Warps: nearest-neighbor resampling with Pillow's own arithmetic, and the weak view's crop and mirror.

Images flow in and out as uint8 (N, C, H, W); the few numbers that say where their pixels come from are NumPy arrays.
A warp is given as the inverse matrix (a, b, c, d, e, f) that Pillow takes: output pixel (x, y) shows input pixel
(a x + b y + c, d x + e y + f), and black where that lies outside.

Whatever moves whole rows (crop, mirror, shear_x, translations) copies rows instead of pixels: the rows are laid out in
one buffer with what lies left and right of them, and each output row is the window of W bytes that begins at its place.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_ONE = 1 << 16  # 1 in 16.16 fixed point


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
    height, width = images.shape[2:]
    if mode not in ("reflect", "zero") or (mode == "reflect" and padding >= min(height, width)):
        raise ValueError(
            f"cannot pad {height} x {width} pixels by {padding} with mode {mode!r}; "
            f"use mode 'zero', or 'reflect' with at most {min(height, width) - 1}"
        )
    offsets = torch.stack((top, left)).numpy(force=True)
    if offsets.size and (offsets.min() < 0 or offsets.max() > 2 * padding):
        found = f"{offsets.min()} to {offsets.max()}"
        raise ValueError(f"crops of images padded by {padding} begin at 0 to {2 * padding}, got {found}")
    lay_out = _reflected_lines if mode == "reflect" else _framed_lines
    lines, plain_first, mirrored_first, rows = lay_out(images.contiguous(), padding)
    plane, line = lines.shape[2] * lines.shape[3], lines.shape[3]
    first = np.where(mirrored.numpy(force=True), mirrored_first[offsets[1]], plain_first[offsets[1]])
    return _windows(lines, first[:, None] + (rows * line)[offsets[0]], images.shape[1], plane, width)


class _Lines(NamedTuple):
    """Rows with all that a crop may show of what lies beside them.

    Attributes:
        lines: uint8 (N, C, rows, length).
        plain_first: (2 * padding + 1,), where in its line the window of a crop begins, by the crop's left offset.
        mirrored_first: (2 * padding + 1,), where its mirror image begins.
        rows: (2 * padding + 1, H), the lines a crop shows, by its top offset.
    """

    lines: Tensor
    plain_first: Integers
    mirrored_first: Integers
    rows: Integers


def _reflected_lines(images: Tensor, padding: int) -> _Lines:
    """Lines r[W-1] .. r[1] r[0] r[1] .. r[W-1] .. r[1] r[0], which hold every window of both directions."""
    count, channels, height, width = images.shape
    lines = images.new_empty(count, channels, height, 3 * width - 2)
    backward = images.flip(3)
    lines[..., :width] = backward
    lines[..., 2 * width - 2 :] = backward
    lines[..., width - 1 : 2 * width - 1] = images
    offset = np.arange(-padding, padding + 1)
    rows = np.arange(height) + offset[:, None]
    rows = (height - 1) - np.abs((height - 1) - np.abs(rows))
    return _Lines(lines, (width - 1) + offset, np.where(offset > 0, 2 * width - 2, 0) - offset, rows)


def _framed_lines(images: Tensor, padding: int) -> _Lines:
    """Lines of the images in a black frame, each followed by its mirror image."""
    height, width = images.shape[2:]
    framed = functional.pad(images, (padding,) * 4)
    offset = np.arange(2 * padding + 1)
    rows = np.arange(height) + offset[:, None]
    return _Lines(torch.cat((framed, framed.flip(3)), dim=3), offset, width + 4 * padding - offset, rows)


def inverse_matrices(angle: Floats, shear: Floats, move: Floats, scale: Floats, height: int, width: int) -> Floats:
    """Inverse matrices, with the roundings of ``Image.rotate`` and of torchvision's ``affine``.

    For one transformation at a time, the others being neutral: a = e = cos / scale, b = shear_x + sin, d = shear_y - sin
    of the angle turned clockwise; the center stays in place under rotation and scaling. Sines may differ from Python's in
    the last bit, which rounding to 15 digits removes, as Pillow rounds.

    Args:
        angle: (N,), degrees counterclockwise.
        shear: (2, N), columns per row and rows per column.
        move: (2, N), columns and rows.
        scale: (N,), factor.
        height: rows of the image.
        width: columns of the image.

    Returns:
        (6, N).
    """
    radians = -np.radians(angle % 360.0)
    sin, cos = np.round(np.sin(radians), 15), np.round(np.cos(radians), 15) / scale
    x, y = width / 2, height / 2
    return np.stack(
        (
            cos,
            shear[0] + sin,
            (cos * -x + sin * -y) + x + move[0],
            shear[1] - sin,
            cos,
            (-sin * -x + cos * -y) + y + move[1],
        )
    )


def warp(images: Tensor, matrices: Floats) -> Tensor:
    """Show each image through its inverse matrix, with nearest neighbors and black outside.

    In 16.16 fixed point the source column is (columns[x] + down[y]) >> 16 and the source row (rows[y] + across[x]) >> 16.

    Args:
        images: uint8 (N, C, H, W).
        matrices: (6, N).

    Returns:
        uint8 (N, C, H, W), contiguous.
    """
    count, channels, height, width = images.shape
    a, b, c, d, e, f = matrices[:, :, None]
    fixed_a, fixed_b, fixed_c, fixed_d, fixed_e, fixed_f = fixed(
        np.stack((a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5))
    )
    x, y = np.arange(width, dtype=np.int32), np.arange(height, dtype=np.int32)
    columns, rows = fixed_c + fixed_a * x, fixed_f + fixed_e * y
    upright = ((b == 0) & (d == 0))[:, 0]
    if upright.any():  # without shear and rotation Pillow adds up coordinates in float64
        columns[upright] = _summed(a[upright], c[upright], width)
        rows[upright] = _summed(e[upright], f[upright], height)
    # The images get a black frame; everything outside is read there.
    device = images.device
    source = to_device((columns + _ONE)[:, None, :], device) + to_device((fixed_b * y)[:, :, None], device)
    source_rows = to_device((rows + _ONE)[:, :, None], device) + to_device((fixed_d * x)[:, None, :], device)
    source.bitwise_right_shift_(16).clamp_(0, width + 1)
    source.add_(source_rows.bitwise_right_shift_(16).clamp_(0, height + 1), alpha=width + 2)
    framed = functional.pad(images, (1, 1, 1, 1)).view(count, channels, -1)
    positions = source.view(count, 1, -1).long().expand(-1, channels, -1)
    return framed.gather(2, positions).view(images.shape)


def slide(images: Tensor, rows: Integers, shifts: Integers) -> Tensor:
    """Move rows: output row y shows input row rows[y] from column shifts[y] on, and black where that lies outside.

    Args:
        images: uint8 (N, C, H, W), contiguous.
        rows: (N, H).
        shifts: (N, H).

    Returns:
        uint8 (N, C, H, W), contiguous.
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


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the array's numbers; on a GPU the copy does not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _windows(lines: Tensor, starts: Integers, channels: int, plane: int, width: int) -> Tensor:
    """Rows of `width` bytes of the buffer: starts (N, H) of the first channel, whose next channel is `plane` bytes on."""
    count, height = starts.shape
    planes = np.arange(count * channels).reshape(count, channels, 1) * plane
    flat = lines.view(-1)
    windows = flat.as_strided((flat.numel() - width + 1, width), (1, 1))
    chosen = to_device((planes + starts[:, None]).reshape(-1), lines.device)
    return windows.index_select(0, chosen).view(count, channels, height, width)


def fixed(values: Floats) -> NDArray[np.int32]:
    """16.16 fixed point, rounded as Pillow rounds."""
    return np.floor(values * _ONE + 0.5).astype(np.int32)


def _summed(step: Floats, offset: Floats, size: int) -> NDArray[np.int32]:
    steps = np.repeat(step, size, axis=1)
    steps[:, :1] = offset + step * 0.5
    return (np.clip(np.floor(np.cumsum(steps, axis=1)), -1, size) * _ONE).astype(np.int32)
