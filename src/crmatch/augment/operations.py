"""The table of operations, and two ways to apply them: one to a whole batch, or a sequence of its own to each image.

Images are uint8 (N, C, H, W) with C of 1 or 3, and results equal Pillow's to the last pixel. Operations that share a kernel are
applied to all their images in one pass, each image with its own operation and value: this makes small groups fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.augment.kernels import color, geometry, resample
from crmatch.augment.kernels.geometry import Floats, to_device
from crmatch.errors import unknown_name_error

# A pass works on this many bytes of images at a time, which bounds the memory of intermediate results (up to 15 times that).
_CHUNK_BYTES = 1 << 24


class Group(NamedTuple):
    """Consecutive images of a pass that get the same operation."""

    name: str
    where: slice


Kernel = Callable[[Tensor, Sequence[Group], Floats], Tensor]
"""Maps uint8 images (N, C, H, W), contiguous and sorted by operation, their groups and values (N,) to new images."""


class Operation(NamedTuple):
    """One operation."""

    kernel: Kernel | None  # None returns the image itself; rows of the table that share a kernel are applied together
    description: str  # one sentence
    unit: str = ""  # what the value means; empty if the operation takes no value
    low: float = 0  # smallest value
    high: float = 0  # largest value
    geometric: bool = False  # whether it moves pixels
    drops_alpha: bool = False  # whether code for RGBA images removes the alpha channel first, because Pillow refuses it
    other: Callable[[Tensor], Tensor] | None = None  # makes the other image of a blend from the image; None is black

    @property
    def signed(self) -> bool:
        """Whether the sign of the value is a direction."""
        return self.low < 0


def _plain(function: Callable[[Tensor], Tensor]) -> Kernel:
    return lambda images, groups, values: function(images)


def _valued(function: Callable[[Tensor, Floats], Tensor]) -> Kernel:
    return lambda images, groups, values: function(images, values)


def _warp(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    """Affine operations: one gather with an inverse matrix per image."""
    (height, width), parameters = images.shape[2:], {}
    for name, where in groups:
        parameters[name] = np.full(len(values), 1.0 if name == "scale" else 0.0)
        parameters[name][where] = values[where]
    return geometry.warp(images, geometry.inverse_matrices(height, width, **parameters))


def _slide(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    """Affine operations that move whole rows: the position of a row's first pixel decides, as in Pillow."""
    height, width = images.shape[2:]
    parameters = {name: np.zeros((len(values), 1)) for name in ("translate_x", "translate_y", "shear_x")}
    for name, where in groups:
        parameters[name][where] = values[where, None]
    positions = np.stack((parameters["translate_x"] * width, parameters["translate_y"] * height)) + 0.5
    distance = np.abs(positions - np.rint(positions))
    if np.any((distance > 0) & (distance < 1e-9)):
        return _warp(images, groups, values)  # so close to an integer, Pillow's repeated addition of 1 may round past it
    columns, rows = np.floor(positions).astype(np.int64)
    row, shear = np.arange(height), parameters["shear_x"]
    shifts = (geometry.to_fixed_point(0.5 + shear * 0.5) + geometry.to_fixed_point(shear) * row >> 16) + columns
    return geometry.slide(images, rows + row, shifts)


def _enhance(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    """``ImageEnhance``: other + factor * (pixel - other) in float32; for brightness the other image is black."""
    pixels = images.to(torch.float32)
    parts = [(pixels[where], other(pixels[where])) for name, where in groups if (other := OPERATIONS[name].other)]
    for part, other_part in parts:
        part.sub_(other_part)
    pixels.mul_(_per_image(values, images))
    for part, other_part in parts:
        part.add_(other_part)
    return color.to_bytes(pixels)


def _blend(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    """``Image.blend``: pixel + share * (other - pixel) in float32."""
    pixels, shares = images.to(torch.float32), _per_image(values, images)
    for name, where in groups:
        other, part = OPERATIONS[name].other, pixels[where]
        assert other is not None
        part.add_((other(images[where]) - part).mul_(shares[where]))
    return color.to_bytes(pixels)


def _per_image(values: Floats, images: Tensor) -> Tensor:
    return to_device(values.astype(np.float32)[:, None, None, None], images.device)


def _hue(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    return images if images.shape[1] == 1 else color.hue(images, to_device(values[:, None, None], images.device))


def _rescale(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    resampling = np.zeros(len(values), dtype=np.int64)
    for name, where in groups:
        resampling[where] = list(resample.FILTERS).index(name.removeprefix("rescale_"))
    return resample.rescale(images, values, resampling)


# Rows that share a kernel stand together, so that they are one pass.
OPERATIONS: dict[str, Operation] = {
    "identity": Operation(None, "Returns the original image."),
    "rotate": Operation(_warp, "Rotates the image counterclockwise.", "degrees", -360, 360, geometric=True),
    "shear_y": Operation(_warp, "Shears the image along the vertical axis.", "rows per column", -1, 1, geometric=True),
    "scale": Operation(_warp, "Enlarges or shrinks the image around its center.", "factor", 0.1, 10, geometric=True),
    "shear_x": Operation(_slide, "Shears the image along the horizontal axis.", "columns per row", -1, 1, geometric=True),
    "translate_x": Operation(_slide, "Translates the image horizontally.", "fraction of the width", -1, 1, geometric=True),
    "translate_y": Operation(_slide, "Translates the image vertically.", "fraction of the height", -1, 1, geometric=True),
    "mirror": Operation(_plain(lambda images: images.flip(3)), "Mirrors the image left to right.", geometric=True),
    "autocontrast": Operation(
        _plain(color.autocontrast), "Makes the darkest pixel black and the lightest white.", drops_alpha=True
    ),
    "equalize": Operation(_plain(color.equalize), "Equalizes the image histogram.", drops_alpha=True),
    "invert": Operation(_plain(torch.bitwise_not), "Inverts all pixels.", drops_alpha=True),
    "posterize": Operation(_valued(color.posterize), "Reduces each pixel to some bits.", "bits", 1, 8, drops_alpha=True),
    "solarize": Operation(
        _valued(color.solarize), "Inverts all pixels from a threshold on.", "threshold", 0, 256, drops_alpha=True
    ),
    "brightness": Operation(_enhance, "Adjusts the brightness: 0 is black, 1 the original.", "factor", 0, 2),
    "contrast": Operation(
        _enhance, "Adjusts the contrast: 0 is plain gray, 1 the original.", "factor", 0, 2, other=color.mean_luma
    ),
    "color": Operation(_enhance, "Adjusts the saturation: 0 is colorless, 1 the original.", "factor", 0, 2, other=color.luma),
    "sharpness": Operation(
        _enhance, "Adjusts the sharpness: 0 is blurred, 1 the original.", "factor", 0, 2, other=color.smooth
    ),
    "autocontrast_blend": Operation(_blend, "Blends the image with its autocontrast.", "share", 0, 1, other=color.autocontrast),
    "equalize_blend": Operation(_blend, "Blends the image with its equalization.", "share", 0, 1, other=color.equalize),
    "invert_blend": Operation(_blend, "Blends the image with its negative.", "share", 0, 1, other=torch.bitwise_not),
    "smooth": Operation(_blend, "Blends the image with a slightly blurred one.", "share", 0, 1, other=color.smooth),
    "blur": Operation(_blend, "Blends the image with a blurred one.", "share", 0, 1, other=color.blur),
    "hue": Operation(_hue, "Turns the color circle.", "turns", -0.5, 0.5),
    **{
        f"rescale_{name}": Operation(_rescale, f"Crops and resizes back ({name}).", "cropped fraction", 0, 0.25, geometric=True)
        for name in resample.FILTERS
    },
}
OPERATION_NAMES = tuple(OPERATIONS)
_PASSES = [
    (kernel, [position for position, _ in rows])
    for kernel, rows in groupby(enumerate(OPERATIONS.values()), key=lambda row: row[1].kernel)
]


def apply_operation(name: str, images: Tensor, values: Tensor) -> Tensor:
    """Apply one operation to every image, each with its own value.

    Args:
        name: a key of `OPERATIONS`.
        images: uint8 (N, C, H, W), sides from 8 to 512; never changed.
        values: (N,), in the operation's unit; ignored by operations without one.

    Returns:
        uint8 (N, C, H, W), contiguous, never the input itself.
    """
    if name not in OPERATIONS:
        raise unknown_name_error("operation", name, OPERATIONS)
    operation = OPERATIONS[name]
    if values.shape != (len(images),):
        raise ValueError(f"{name} needs one value per image, shape ({len(images)},), got {tuple(values.shape)}")
    if operation.unit and not bool(((values >= operation.low) & (values <= operation.high)).all()):
        found = f"{values.min():g} to {values.max():g}"
        raise ValueError(f"{name} takes values from {operation.low:g} to {operation.high:g} ({operation.unit}), got {found}")
    kinds = torch.full((len(images), 1), OPERATION_NAMES.index(name))
    return apply_sequence(images, kinds, values.to("cpu", torch.float64)[:, None])


def apply_sequence(images: Tensor, operations: Tensor, values: Tensor) -> Tensor:
    """Apply a sequence of operations to each image, one after the other.

    Args:
        images: uint8 (N, C, H, W) with C of 1 or 3 and sides from 8 to 512; never changed.
        operations: int64 (N, steps) on the CPU, positions in `OPERATION_NAMES`.
        values: float64 (N, steps) on the CPU, in range.

    Returns:
        uint8 (N, C, H, W), contiguous, never the input itself.
    """
    shape = tuple(images.shape)
    if images.dtype != torch.uint8 or len(shape) != 4 or shape[1] not in (1, 3) or min(shape[2:]) < 8 or max(shape[2:]) > 512:
        found = f"{images.dtype} {shape}"
        raise ValueError(f"images must be uint8 (N, C, H, W) with 1 or 3 channels and sides from 8 to 512, got {found}")
    assert len(operations) == len(values) == len(images), "one row of operations and values per image"
    kinds, strengths = operations.numpy(force=True), values.numpy(force=True)
    result = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    chunk = max(_CHUNK_BYTES // max(images[:1].numel(), 1), 1)
    with torch.inference_mode():  # less overhead per call; `result` was created outside, so it stays an ordinary tensor
        for start in range(0, len(images), chunk):
            part = slice(start, start + chunk)
            _apply_chunk(images[part].contiguous(), kinds[part], strengths[part], out=result[part])
    return result


def _apply_chunk(images: Tensor, kinds: NDArray[np.int64], values: Floats, out: Tensor) -> None:
    current = np.arange(len(images))  # the original position of each image
    for step in range(kinds.shape[1]):
        order = np.argsort(kinds[current, step], kind="stable")
        current = current[order]
        images = images.index_select(0, to_device(order, images.device))
        _apply_sorted_(images, kinds[current, step], values[current, step])
    torch.index_select(images, 0, to_device(np.argsort(current), images.device), out=out)


def _apply_sorted_(images: Tensor, kinds: NDArray[np.int64], values: Floats) -> None:
    """Apply one operation to each image in place, one pass per kernel; the images are sorted by operation."""
    edges = np.searchsorted(kinds, np.arange(len(OPERATIONS) + 1)).tolist()
    for kernel, positions in _PASSES:
        start, end = edges[positions[0]], edges[positions[-1] + 1]
        if kernel is not None and start < end:
            groups = [
                Group(OPERATION_NAMES[position], slice(edges[position] - start, edges[position + 1] - start))
                for position in positions
                if edges[position] < edges[position + 1]
            ]
            images[start:end] = kernel(images[start:end], groups, values[start:end])
