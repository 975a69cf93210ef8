"""Families of operations: what can be done to many images in one pass, each with its own operation and value.

A family function receives its images uint8 (N, C, H, W), contiguous and sorted by operation, the groups of equal
operation, and the values (N,), and returns uint8 (N, C, H, W). It never changes its input. The operation `identity` is
of no family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crmatch.augment import color, filters, geometry, resample
from crmatch.augment.cutout import centered_boxes, cut_out_
from crmatch.augment.geometry import Floats, to_device

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
