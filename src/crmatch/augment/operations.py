"""Families of operations: what can be done to many images in one pass, each with its own operation and value.

A family function receives its images uint8 (N, C, H, W), contiguous and sorted by operation, the groups of equal
operation, and the values (N,), and returns uint8 (N, C, H, W). It never changes its input. The operation `identity` is
of no family.

The table of operations, and the two ways to apply them: one to a whole batch, or several to each image.

Images are uint8 (N, C, H, W) with C of 1 or 3, and results equal Pillow's to the last pixel.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.augment.kernels import color, filters, geometry, resample
from crmatch.augment.kernels.cutout import centered_boxes, cut_out_
from crmatch.augment.kernels.geometry import Floats, to_device

_AFFINE = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", "scale")


class Group(NamedTuple):
    """Consecutive images of a family that get the same operation."""

    name: str
    where: slice


def _warp(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    """Everything affine: one gather with a matrix per image."""
    height, width = images.shape[2:]
    parameters = np.zeros((len(_AFFINE), len(values)))
    parameters[-1] = 1
    for name, where in groups:
        side = {"translate_x": width, "translate_y": height}.get(name, 1)
        parameters[_AFFINE.index(name), where] = values[where] * side
    angle, shear, move, scale = parameters[0], parameters[1:3], parameters[3:5], parameters[5]
    return geometry.warp(images, geometry.inverse_matrices(angle, shear, move, scale, height, width))


def _slide(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    """Affine operations that move whole rows: Pillow's position of a row's first pixel decides."""
    height, width = images.shape[2:]
    shear, moves = np.zeros((len(values), 1)), np.zeros((2, len(values), 1))
    for name, where in groups:
        target = {"shear_x": shear, "translate_x": moves[0], "translate_y": moves[1]}[name]
        target[where] = values[where, None]
    positions = moves * np.array([width, height])[:, None, None] + 0.5
    columns, rows = np.floor(positions).astype(np.int64)
    distance = np.abs(positions - np.rint(positions))
    if np.any((distance > 0) & (distance < 1e-9)):
        return _warp(images, groups, values)  # so near to an integer, Pillow's sum of ones may jump over it
    row = np.arange(height)
    shifts = (geometry.fixed(0.5 + shear * 0.5) + geometry.fixed(shear) * row >> 16) + columns
    return geometry.slide(images, rows + row, shifts)


def _enhance(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    """Operations that blend a plainer image with the image: base + factor * (pixel - base) in float32."""
    pixels = images.to(torch.float32)
    parts = {name: pixels[where] for name, where in groups}
    bases = {name: _base(name, parts[name], images[where]) for name, where in groups if name != "brightness"}
    for name, base in bases.items():
        parts[name].sub_(base)
    pixels.mul_(_column(values, images))
    for name, base in bases.items():
        parts[name].add_(base)
    return color.to_bytes(pixels)


def _base(name: str, pixels: Tensor, images: Tensor) -> Tensor:
    """The plainer image: smoothed, without color, or of one gray; for brightness it is black."""
    if name == "sharpness":
        return filters.smooth(images)
    gray = color.luma(pixels)
    return gray if name == "color" else color.rounded_mean(gray)


def _mix(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    """Operations that blend the image with a changed one: pixel + share * (changed - pixel) in float32."""
    pixels = images.to(torch.float32)
    shares = _column(values, images)
    for name, where in groups:
        color.mix_(pixels[where], _CHANGED[name](images[where]), shares[where])
    return color.to_bytes(pixels)


def _hue(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    if images.shape[1] == 1:
        return images
    return color.hue(images, to_device(values[:, None, None], images.device))


def _rescale(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    filter_names = tuple(resample.FILTERS)
    resampling = np.zeros(len(values), dtype=np.int64)
    for name, where in groups:
        resampling[where] = filter_names.index(name.removeprefix("rescale_"))
    return resample.rescale(images, values, resampling)


def _cutout(images: Tensor, groups: Sequence[Group], values: Floats) -> Tensor:
    return cut_out_(images.clone(), centered_boxes(values, *images.shape[2:]))


def _column(values: Floats, images: Tensor) -> Tensor:
    return to_device(values.astype(np.float32)[:, None, None, None], images.device)


_CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "autocontrast_blend": color.autocontrast,
    "equalize_blend": color.equalize,
    "invert_blend": torch.bitwise_not,
    "smooth": filters.smooth,
    "blur": filters.blur,
}
FAMILIES: dict[str, Callable[[Tensor, Sequence[Group], Floats], Tensor]] = {
    "warp": _warp,
    "slide": _slide,
    "autocontrast": lambda images, groups, values: color.autocontrast(images),
    "equalize": lambda images, groups, values: color.equalize(images),
    "enhance": _enhance,
    "mix": _mix,
    "posterize": lambda images, groups, values: color.posterize(images, values),
    "solarize": lambda images, groups, values: color.solarize(images, values),
    "invert": lambda images, groups, values: ~images,
    "hue": _hue,
    "rescale": _rescale,
    "cutout": _cutout,
    "mirror": lambda images, groups, values: images.flip(3),
}


class Operation(NamedTuple):
    """One operation.

    Attributes:
        family: operations of a family are applied together; empty for the identity.
        low: smallest value.
        high: largest value.
        signed: whether the sign of the value is a direction.
        unit: what the value counts; empty if the operation takes none.
        description: one sentence.
    """

    family: str
    low: float
    high: float
    signed: bool
    unit: str
    description: str


_RESCALED = "Crops a share off each side and resizes back with the {} filter."
OPERATIONS: dict[str, Operation] = {
    "identity": Operation("", 0, 0, False, "", "Returns the original image."),
    "rotate": Operation("warp", -360, 360, True, "degrees", "Rotates the image counterclockwise."),
    "shear_y": Operation("warp", -1, 1, True, "rows per column", "Shears the image along the vertical axis."),
    "scale": Operation("warp", 0.1, 10, False, "factor", "Enlarges or shrinks the image around its center."),
    "shear_x": Operation("slide", -1, 1, True, "columns per row", "Shears the image along the horizontal axis."),
    "translate_x": Operation("slide", -1, 1, True, "fraction of the width", "Translates the image horizontally."),
    "translate_y": Operation("slide", -1, 1, True, "fraction of the height", "Translates the image vertically."),
    "autocontrast": Operation("autocontrast", 0, 0, False, "", "Makes the darkest pixel black and the lightest white."),
    "equalize": Operation("equalize", 0, 0, False, "", "Equalizes the image histogram."),
    "brightness": Operation("enhance", 0, 2, False, "factor", "Adjusts the brightness: 0 is black, 1 the original."),
    "contrast": Operation("enhance", 0, 2, False, "factor", "Adjusts the contrast: 0 is plain gray, 1 the original."),
    "color": Operation("enhance", 0, 2, False, "factor", "Adjusts the saturation: 0 is colorless, 1 the original."),
    "sharpness": Operation("enhance", 0, 2, False, "factor", "Adjusts the sharpness: 0 is blurred, 1 the original."),
    "autocontrast_blend": Operation("mix", 0, 1, False, "share", "Blends the image with its autocontrast."),
    "equalize_blend": Operation("mix", 0, 1, False, "share", "Blends the image with its equalization."),
    "invert_blend": Operation("mix", 0, 1, False, "share", "Blends the image with its negative."),
    "smooth": Operation("mix", 0, 1, False, "share", "Blends the image with a slightly blurred one."),
    "blur": Operation("mix", 0, 1, False, "share", "Blends the image with a blurred one."),
    "posterize": Operation("posterize", 1, 8, False, "bits", "Reduces each pixel to some bits."),
    "solarize": Operation("solarize", 0, 256, False, "threshold", "Inverts all pixels from a threshold on."),
    "invert": Operation("invert", 0, 0, False, "", "Inverts all pixels."),
    "hue": Operation("hue", -0.5, 0.5, True, "turns", "Turns the color circle."),
    "rescale_lanczos": Operation("rescale", 0, 0.25, False, "share", _RESCALED.format("Lanczos")),
    "rescale_bicubic": Operation("rescale", 0, 0.25, False, "share", _RESCALED.format("bicubic")),
    "rescale_bilinear": Operation("rescale", 0, 0.25, False, "share", _RESCALED.format("bilinear")),
    "rescale_box": Operation("rescale", 0, 0.25, False, "share", _RESCALED.format("box")),
    "rescale_hamming": Operation("rescale", 0, 0.25, False, "share", _RESCALED.format("Hamming")),
    "rescale_nearest": Operation("rescale", 0, 0.25, False, "share", _RESCALED.format("nearest-neighbor")),
    "cutout": Operation("cutout", 0, 1, False, "fraction of the side", "Covers a gray square in the middle."),
    "mirror": Operation("mirror", 0, 0, False, "", "Mirrors the image left to right."),
}
OPERATION_NAMES = tuple(OPERATIONS)
_ALL_POSITIONS = np.arange(len(OPERATION_NAMES) + 1)
# Position of each family's first operation in OPERATION_NAMES, and of its last + 1; the table keeps families together.
_SPANS = {
    family: (
        min(k for k, operation in enumerate(OPERATIONS.values()) if operation.family == family),
        max(k for k, operation in enumerate(OPERATIONS.values()) if operation.family == family) + 1,
    )
    for family in FAMILIES
}
# So many bytes of images are worked on at a time, which bounds the memory of intermediate results (up to 15 times that).
_CHUNK_BYTES = 1 << 24


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
        near = difflib.get_close_matches(name, OPERATION_NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown operation {name!r}; {hint}known: {', '.join(sorted(OPERATION_NAMES))}")
    check_images(images)
    _check_values(name, values, len(images))
    kinds = torch.full((len(images), 1), OPERATION_NAMES.index(name))
    return apply_sequence(images, kinds, values.to("cpu", torch.float64)[:, None])


def apply_sequence(images: Tensor, operations: Tensor, values: Tensor) -> Tensor:
    """Apply operations to each image one after the other, to every image its own.

    In every step the images are brought together by family, and each family takes one pass over its images. Values are
    trusted to be in range.

    Args:
        images: uint8 (N, C, H, W); never changed.
        operations: int64 (N, steps) on the CPU, positions in `OPERATION_NAMES`.
        values: float64 (N, steps) on the CPU.

    Returns:
        uint8 (N, C, H, W), contiguous, never the input itself.
    """
    kinds, strengths = operations.numpy(force=True), values.numpy(force=True)
    result = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    chunk = max(_CHUNK_BYTES // max(images[:1].numel(), 1), 1)
    with torch.inference_mode():  # less work per call; the result is made outside, as an ordinary tensor
        for start in range(0, len(images), chunk):
            where = slice(start, start + chunk)
            _apply_chunk(images[where].contiguous(), kinds[where], strengths[where], out=result[where])
    return result


def check_images(images: Tensor) -> None:
    """Refuse what is not uint8 (N, C, H, W) with C of 1 or 3 and sides from 8 to 512."""
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8, got {images.dtype}; scale to 0..255 and convert with .to(torch.uint8)")
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] not in (1, 3):
        raise ValueError(f"images must be (N, C, H, W) with C of 1 or 3, got {shape}")
    if not all(8 <= side <= 512 for side in shape[2:]):
        raise ValueError(f"images must have sides from 8 to 512 pixels, got {shape[2]} x {shape[3]}; resize them first")


def check_draws(operations: Tensor, images: Tensor) -> None:
    """Refuse draws that were not made for these images."""
    if len(operations) != len(images):
        raise ValueError(f"draws for {len(operations)} images cannot be applied to {len(images)}; draw one per image")


def _check_values(name: str, values: Tensor, count: int) -> None:
    _, low, high, _, unit, _ = OPERATIONS[name]
    if values.shape != (count,):
        raise ValueError(f"{name} needs one value per image, shape ({count},), got {tuple(values.shape)}")
    if unit and not bool(((values >= low) & (values <= high)).all()):
        found = f"{values.min():g} to {values.max():g}"
        raise ValueError(f"{name} takes values from {low:g} to {high:g} ({unit}), got {found}")


def _apply_chunk(images: Tensor, kinds: NDArray[np.int64], values: Floats, out: Tensor) -> None:
    current = np.arange(len(images))
    for step in range(kinds.shape[1]):
        order = np.argsort(kinds[current, step], kind="stable")
        current = current[order]
        images = images.index_select(0, to_device(order, images.device))
        _apply_sorted_(images, kinds[current, step], values[current, step])
    torch.index_select(images, 0, to_device(np.argsort(current), images.device), out=out)


def _apply_sorted_(images: Tensor, kinds: NDArray[np.int64], values: Floats) -> None:
    """One step in place, for images that are sorted by operation."""
    edges = np.searchsorted(kinds, _ALL_POSITIONS).tolist()
    for family, (first, last) in _SPANS.items():
        start, end = edges[first], edges[last]
        if start < end:
            part = images[start:end]
            bounds = [edge - start for edge in edges[first : last + 1]]
            groups = [
                Group(name, slice(*bound))
                for name, bound in zip(OPERATION_NAMES[first:last], pairwise(bounds), strict=True)
                if bound[0] < bound[1]
            ]
            part.copy_(FAMILIES[family](part, groups, values[start:end]))
