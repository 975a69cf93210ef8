"""The image-by-image Pillow pipeline: what every operation must give to the last pixel, and what the benchmark beats.

Imports nothing from crmatch. Images are uint8 arrays (H, W, 3) or (H, W) for gray; `OPERATIONS[name](image, value)` takes
and returns a Pillow image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

Operation = Callable[[Image.Image, float], Image.Image]
AFFINE = Image.Transform.AFFINE
RESCALE_FILTERS = {
    "lanczos": Image.Resampling.LANCZOS,
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "nearest": Image.Resampling.NEAREST,
}


def scale(image: Image.Image, factor: float) -> Image.Image:
    """torchvision's RandomAffine(0, scale=...): around the center, nearest neighbors, black outside."""
    inverse = 1.0 / factor
    x, y = image.width * 0.5, image.height * 0.5
    matrix = (inverse, 0.0, inverse * -x + 0.0 * -y + x, 0.0, inverse, 0.0 * -x + inverse * -y + y)
    return image.transform(image.size, AFFINE, matrix)


def hue(image: Image.Image, shift: float) -> Image.Image:
    """torchvision's adjust_hue: the H channel of Pillow's HSV plus int(shift * 255), modulo 256."""
    if image.mode == "L":
        return image
    h, s, v = image.convert("HSV").split()
    turned = np.array(h, dtype=np.uint8) + np.array(int(shift * 255)).astype(np.uint8)
    return Image.merge("HSV", (Image.fromarray(turned), s, v)).convert("RGB")


def rescale(image: Image.Image, fraction: float, resampling: Image.Resampling) -> Image.Image:
    """CTAugment's rescale: crop a fraction off each side and resize back."""
    width, height = image.size
    box = (fraction * width, fraction * height, width * (1 - fraction), height * (1 - fraction))
    return image.crop(box).resize(image.size, resampling)


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return lambda image, value: enhancer(image).enhance(value)


def _blended(operation: Callable[[Image.Image], Image.Image]) -> Operation:
    return lambda image, value: Image.blend(image, operation(image), value)


OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, value: image,
    "autocontrast": lambda image, value: ImageOps.autocontrast(image),
    "equalize": lambda image, value: ImageOps.equalize(image),
    "invert": lambda image, value: ImageOps.invert(image),
    "mirror": lambda image, value: ImageOps.mirror(image),
    "brightness": _enhance(ImageEnhance.Brightness),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "posterize": lambda image, value: ImageOps.posterize(image, int(value)),
    "solarize": lambda image, value: ImageOps.solarize(image, value),
    "rotate": lambda image, value: image.rotate(value),
    "shear_x": lambda image, value: image.transform(image.size, AFFINE, (1, value, 0, 0, 1, 0)),
    "shear_y": lambda image, value: image.transform(image.size, AFFINE, (1, 0, 0, value, 1, 0)),
    "translate_x": lambda image, value: image.transform(image.size, AFFINE, (1, 0, value * image.width, 0, 1, 0)),
    "translate_y": lambda image, value: image.transform(image.size, AFFINE, (1, 0, 0, 0, 1, value * image.height)),
    "scale": scale,
    "hue": hue,
    "blur": _blended(lambda image: image.filter(ImageFilter.BLUR)),
    "smooth": _blended(lambda image: image.filter(ImageFilter.SMOOTH)),
    "autocontrast_blend": _blended(ImageOps.autocontrast),
    "equalize_blend": _blended(ImageOps.equalize),
    "invert_blend": _blended(ImageOps.invert),
    **{
        f"rescale_{name}": lambda image, value, resampling=resampling: rescale(image, value, resampling)
        for name, resampling in RESCALE_FILTERS.items()
    },
}


def rectangle(height: int, width: int, row: float, column: float, side: float) -> np.ndarray:
    """What the PyTorch ports of FixMatch cover around a center: bool (height, width)."""
    left, top = int(max(0, column - side / 2)), int(max(0, row - side / 2))
    picture = Image.new("L", (width, height))
    ImageDraw.Draw(picture).rectangle((left, top, min(width, left + side), min(height, top + side)), 255)
    return np.asarray(picture) == 255


def google(image: np.ndarray, operations: Iterable[tuple[str, float]]) -> np.ndarray:
    """The same in google-research/fixmatch: on RGBA, so that what a warp uncovers is transparent and ends gray."""
    picture = Image.fromarray(image).convert("RGBA")
    for name, value in operations:
        if name in ("autocontrast", "equalize", "posterize", "solarize"):
            picture = OPERATIONS[name](picture.convert("RGB"), value).convert("RGBA")
        else:
            picture = OPERATIONS[name](picture, value)
    result = np.array(picture)
    result[result[..., 3] == 0] = 127
    return result[..., :3]


def weak(image: np.ndarray, top: int, left: int, mirrored: bool, padding: int) -> np.ndarray:
    """Reflect-pad, crop back, maybe mirror."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0))[: image.ndim], mode="reflect")
    crop = padded[top : top + height, left : left + width]
    return np.fliplr(crop) if mirrored else crop


def strong(
    image: np.ndarray,
    operations: Iterable[tuple[str, float]],
    box: tuple[int, int, int, int],
    color: tuple[int, int, int] | int,
) -> np.ndarray:
    """Operations one after the other, then the box (first row, first column, end row, end column) filled with `color`."""
    picture = Image.fromarray(image)
    for name, value in operations:
        picture = OPERATIONS[name](picture, value)
    result = np.array(picture)
    top, left, bottom, right = box
    result[top:bottom, left:right] = color
    return result
