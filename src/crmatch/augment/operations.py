"""The table of operations, and the two ways to apply them: one to a batch, or one per image."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.augment import color, filters, geometry


class Operation(NamedTuple):
    """One operation.

    Attributes:
        family: operations of a family are applied together in one pass over their images.
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


class Group(NamedTuple):
    """Consecutive images of a family that get the same operation."""

    name: str
    where: slice


OPERATIONS: dict[str, Operation] = {
    "identity": Operation("identity", 0, 1, False, "", "Returns the original image."),
    "rotate": Operation("warp", -360, 360, True, "degrees", "Rotates the image counterclockwise."),
    "shear_y": Operation("warp", -1, 1, True, "rows per column", "Shears the image along the vertical axis."),
    "scale": Operation("warp", 0.1, 10, False, "factor", "Enlarges or shrinks the image around its center."),
    "shear_x": Operation("slide", -1, 1, True, "columns per row", "Shears the image along the horizontal axis."),
    "translate_x": Operation("slide", -1, 1, True, "fraction of the width", "Translates the image horizontally."),
    "translate_y": Operation("slide", -1, 1, True, "fraction of the height", "Translates the image vertically."),
    "autocontrast": Operation("table", 0, 1, False, "", "Sets the darkest pixel to black and the lightest to white."),
    "equalize": Operation("table", 0, 1, False, "", "Equalizes the image histogram."),
    "posterize": Operation("posterize", 1, 8, False, "bits", "Reduces each pixel to some bits."),
    "solarize": Operation("solarize", 0, 256, False, "threshold", "Inverts all pixels from a threshold on."),
    "invert": Operation("invert", 0, 1, False, "", "Inverts all pixels."),
    "brightness": Operation("blend", 0, 2, False, "factor", "Adjusts the brightness; 0 is black, 1 the original."),
    "contrast": Operation("blend", 0, 2, False, "factor", "Adjusts the contrast; 0 is plain gray, 1 the original."),
    "color": Operation("blend", 0, 2, False, "factor", "Adjusts the saturation; 0 is black and white, 1 the original."),
    "sharpness": Operation("blend", 0, 2, False, "factor", "Adjusts the sharpness; 0 is blurred, 1 the original."),
}
OPERATION_NAMES = tuple(OPERATIONS)
_POSITIONS = {name: position for position, name in enumerate(OPERATION_NAMES)}


def apply_operation(name: str, images: Tensor, values: Tensor) -> Tensor:
    """Apply one operation to every image, each with its own value.

    Args:
        name: a key of `OPERATIONS`.
        images: uint8 (N, C, H, W), C of 1 or 3; never changed.
        values: (N,), in the operation's unit; ignored by operations without one.

    Returns:
        uint8 (N, C, H, W), contiguous.
    """
    if name not in OPERATIONS:
        near = difflib.get_close_matches(name, OPERATION_NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown operation {name!r}; {hint}known: {', '.join(sorted(OPERATION_NAMES))}")
    check_images(images)
    values = _checked_values(name, values, len(images))
    return _FAMILIES[OPERATIONS[name].family](images.contiguous(), [Group(name, slice(0, len(images)))], values)


def apply_each(images: Tensor, operations: Tensor, values: Tensor) -> Tensor:
    """Apply one operation per image: images are brought together by family, each family takes one pass.

    Args:
        images: uint8 (N, C, H, W); never changed.
        operations: int64 (N,) on the CPU, positions in `OPERATION_NAMES`.
        values: float64 (N,) on the CPU.

    Returns:
        uint8 (N, C, H, W), contiguous.
    """
    order = torch.argsort(operations, stable=True)
    counts = torch.bincount(operations, minlength=len(OPERATION_NAMES)).tolist()
    sorted_images = images.index_select(0, order.to(images.device))
    sorted_values = values[order]
    results = []
    start = 0
    for family, members in _MEMBERS.items():
        groups, end = [], start
        for name in members:
            size = counts[_POSITIONS[name]]
            if size:
                groups.append(Group(name, slice(end - start, end - start + size)))
            end += size
        if end > start:
            results.append(_FAMILIES[family](sorted_images[start:end], groups, sorted_values[start:end]))
        start = end
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return torch.cat(results).index_select(0, inverse.to(images.device))


def check_images(images: Tensor) -> None:
    """Refuse what is not uint8 (N, C, H, W) with C of 1 or 3."""
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8, got {images.dtype}; scale to 0..255 and convert with .to(torch.uint8)")
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images must be (N, C, H, W) with C of 1 or 3, got {tuple(images.shape)}")


def _checked_values(name: str, values: Tensor, count: int) -> Tensor:
    operation = OPERATIONS[name]
    if values.shape != (count,):
        raise ValueError(f"{name} needs one value per image, shape ({count},), got {tuple(values.shape)}")
    values = values.to("cpu", torch.float64)
    if operation.unit and not bool(((values >= operation.low) & (values <= operation.high)).all()):
        raise ValueError(
            f"{name} takes values from {operation.low:g} to {operation.high:g} ({operation.unit}), "
            f"got {values.min():g} to {values.max():g}"
        )
    return values


def _identity(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    return images


def _matrices(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    height, width = images.shape[2:]
    parameters = torch.zeros(6, len(values), dtype=torch.float64)
    parameters[5] = 1
    for name, where in groups:
        side = {"translate_x": width, "translate_y": height}.get(name, 1)
        parameters[_PARAMETERS.index(name), where] = values[where] * side
    return geometry.inverse_matrices(parameters[0], parameters[1:3], parameters[3:5], parameters[5], height, width)


def _warp(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    return geometry.warp(images, _matrices(images, groups, values))


def _slide(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    return geometry.slide(images, _matrices(images, groups, values))


def _posterize(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    return color.posterize(images, values)


def _solarize(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    return color.solarize(images, values)


def _invert(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    return ~images


def _table(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    flat = images.flatten(2)
    positions = flat.long()
    tables = [
        color.autocontrast_tables(flat[where])
        if name == "autocontrast"
        else color.equalize_tables(flat[where], positions[where])
        for name, where in groups
    ]
    return color.look_up(positions, torch.cat(tables)).view(images.shape)


def _blend(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    pixels = images.to(torch.float32)
    factors = values.to(images.device, torch.float32)[:, None, None, None]
    for name, where in groups:
        if name == "brightness":
            pixels[where].mul_(factors[where])
        elif name == "contrast":
            color.blend_(color.mean_luma(pixels[where]), pixels[where], factors[where])
        elif name == "color":
            color.blend_(color.luma(pixels[where]), pixels[where], factors[where])
        else:
            color.blend_(filters.smooth(images[where]), pixels[where], factors[where])
    return color.to_bytes(pixels)


_PARAMETERS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y", "scale")
_FAMILIES: dict[str, Callable[[Tensor, list[Group], Tensor], Tensor]] = {
    "identity": _identity,
    "warp": _warp,
    "slide": _slide,
    "table": _table,
    "posterize": _posterize,
    "solarize": _solarize,
    "invert": _invert,
    "blend": _blend,
}
_MEMBERS = {
    family: tuple(name for name, operation in OPERATIONS.items() if operation.family == family) for family in _FAMILIES
}
