"""The table of operations, and the two ways to apply them: one to a whole batch, or several to each image.

Images are uint8 (N, C, H, W) with C of 1 or 3, and results equal Pillow's to the last pixel.
"""

from __future__ import annotations

import difflib
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.augment.families import FAMILIES, Group
from crmatch.augment.geometry import Floats, to_device


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
