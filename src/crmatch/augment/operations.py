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
    "shear_x": Operation("warp", -1, 1, True, "columns per row", "Shears the image along the horizontal axis."),
    "shear_y": Operation("warp", -1, 1, True, "rows per column", "Shears the image along the vertical axis."),
    "translate_x": Operation("warp", -1, 1, True, "fraction of the width", "Translates the image horizontally."),
    "translate_y": Operation("warp", -1, 1, True, "fraction of the height", "Translates the image vertically."),
    "scale": Operation("warp", 0.1, 10, False, "factor", "Enlarges or shrinks the image around its center."),
    "autocontrast": Operation("table", 0, 1, False, "", "Sets the darkest pixel to black and the lightest to white."),
    "equalize": Operation("table", 0, 1, False, "", "Equalizes the image histogram."),
    "posterize": Operation("table", 1, 8, False, "bits", "Reduces each pixel to some bits."),
    "solarize": Operation("table", 0, 256, False, "threshold", "Inverts all pixels from a threshold on."),
    "brightness": Operation("table", 0, 2, False, "factor", "Adjusts the brightness; 0 is black, 1 the original."),
    "contrast": Operation("table", 0, 2, False, "factor", "Adjusts the contrast; 0 is plain gray, 1 the original."),
    "invert": Operation("table", 0, 1, False, "", "Inverts all pixels."),
    "color": Operation("color", 0, 2, False, "factor", "Adjusts the saturation; 0 is black and white, 1 the original."),
    "sharpness": Operation("sharpness", 0, 2, False, "factor", "Adjusts the sharpness; 0 is blurred, 1 the original."),
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


def _warp(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    height, width = images.shape[2:]
    parameters = torch.zeros(len(_MEMBERS["warp"]), len(values), dtype=torch.float64)
    angle, shear_x, shear_y, move_x, move_y, scale = parameters
    scale.fill_(1)
    for name, where in groups:
        parameters[_MEMBERS["warp"].index(name), where] = values[where]
    matrices = geometry.inverse_matrices(
        angle, shear_x, shear_y, move_x * width, move_y * height, scale, height, width
    )
    return geometry.warp(images, matrices)


def _table(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    tables = [_TABLES[name](images[where], values[where]) for name, where in groups]
    return color.look_up(images, torch.cat(tables))


def _color(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    return color.blend(color.luma(images), images, values)


def _sharpness(images: Tensor, groups: list[Group], values: Tensor) -> Tensor:
    return color.blend(filters.smooth(images), images, values)


_TABLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": lambda images, values: color.autocontrast_tables(images),
    "equalize": lambda images, values: color.equalize_tables(images),
    "posterize": color.posterize_tables,
    "solarize": color.solarize_tables,
    "brightness": color.brightness_tables,
    "contrast": color.contrast_tables,
    "invert": lambda images, values: color.invert_tables(images),
}
_FAMILIES: dict[str, Callable[[Tensor, list[Group], Tensor], Tensor]] = {
    "identity": _identity,
    "warp": _warp,
    "table": _table,
    "color": _color,
    "sharpness": _sharpness,
}
_MEMBERS = {
    family: tuple(name for name, operation in OPERATIONS.items() if operation.family == family) for family in _FAMILIES
}
