"""RandAugment's variants as data: what each code base draws. Imports no torch, like every description of a run.

All of them draw operations uniformly with replacement, from the same 14 but for FeatMatch's 16, and end with CutOut; they
differ in everything else. Sources: `paper` is the table printed in CR-Match's appendix; `google` is
google-research/fixmatch; `author` is YUE-FAN/FixMatch-PyTorch; `kekmodel` is kekmodel/FixMatch-pytorch; `usb` is
microsoft/Semi-supervised-learning; `featmatch` is GT-RIPL/FeatMatch, whose level 0..9 and place within the level are together
a uniform strength, but for its bicubic warps around the center (here as everywhere: nearest neighbors).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

RANDAUGMENT_OPERATIONS = (
    "autocontrast",
    "brightness",
    "color",
    "contrast",
    "equalize",
    "identity",
    "posterize",
    "rotate",
    "sharpness",
    "shear_x",
    "shear_y",
    "solarize",
    "translate_x",
    "translate_y",
)
FEATMATCH_OPERATIONS = (*RANDAUGMENT_OPERATIONS, "invert", "mirror")
GEOMETRIC = frozenset(("rescale", "rotate", "shear_x", "shear_y", "translate_x", "translate_y"))
"""Operations that move pixels; they make no sense where neighboring pixels have nothing to do with each other."""
HIGHEST_LEVEL = 9
LEVEL_SCALE = 10


class Magnitude(NamedTuple):
    """How an operation's value is made from a strength s: value = start + rounding(span * s).

    Attributes:
        start: value at strength 0.
        span: how far the value moves from strength 0 to strength 1.
        rounding: of the moved part; `truncate` is Python's `int`, `nearest` rounds half to even.
        unit: `value` is the operation's own unit; `pixels` means that `span` counts pixels; `whole_pixels` means that
            the moved part is a fraction of the side, rounded as a number of pixels.
    """

    start: float
    span: float
    rounding: Literal["none", "truncate", "nearest"] = "none"
    unit: Literal["value", "pixels", "whole_pixels"] = "value"


class CutOut(NamedTuple):
    """The square that ends every strong view.

    Attributes:
        smallest: lower end of the uniform draw of the side, as a fraction of the image's side.
        largest: its upper end.
        pixels: the side in pixels whatever the image's size; 0 means that the fractions count.
        end_included: Pillow's rectangle: its end pixel belongs to it, and a square that would begin above or left of
            the image is moved inside instead of being clipped.
        color: of the square; gray images get its luma.
    """

    smallest: float = 0.5
    largest: float = 0.5
    pixels: int = 0
    end_included: bool = False
    color: tuple[int, int, int] = (127, 127, 127)


@dataclass(frozen=True)
class Variant:
    """One column of the specification's table (section 5).

    Attributes:
        num_ops: operations drawn per image.
        apply_probability: of each of them.
        strength: `uniform` draws s in [0, 1), `level` draws l in 1..9 and takes s = l / 10.
        signed: whether rotate, shear and translate get a random sign (else their range is two-sided already).
        magnitudes: operation -> how its value is made; operations without a value are absent.
        gray_fill: whether areas that a warp uncovers end gray instead of black.
        cutout: the final square.
        operations: names of those that are drawn.
    """

    num_ops: int
    apply_probability: float
    strength: Literal["uniform", "level"]
    signed: bool
    magnitudes: dict[str, Magnitude]
    gray_fill: bool
    cutout: CutOut
    operations: tuple[str, ...] = RANDAUGMENT_OPERATIONS


def _magnitudes(
    factor: Magnitude, posterize: Magnitude, rotate: Magnitude, shear: Magnitude, solarize: Magnitude, translate: Magnitude
) -> dict[str, Magnitude]:
    return {
        "brightness": factor,
        "color": factor,
        "contrast": factor,
        "posterize": posterize,
        "rotate": rotate,
        "sharpness": factor,
        "shear_x": shear,
        "shear_y": shear,
        "solarize": solarize,
        "translate_x": translate,
        "translate_y": translate,
    }


VARIANTS: dict[str, Variant] = {
    "paper": Variant(
        num_ops=2,
        apply_probability=1.0,
        strength="uniform",
        signed=False,
        magnitudes=_magnitudes(
            factor=Magnitude(0.05, 0.9),
            posterize=Magnitude(4, 5, "truncate"),
            rotate=Magnitude(-30, 60),
            shear=Magnitude(-0.3, 0.6),
            solarize=Magnitude(0, 256),
            translate=Magnitude(-0.3, 0.6),
        ),
        gray_fill=False,
        cutout=CutOut(),
    ),
    "google": Variant(
        num_ops=2,
        apply_probability=0.5,
        strength="level",
        signed=True,
        magnitudes=_magnitudes(
            factor=Magnitude(0.1, 1.8),
            posterize=Magnitude(4, -4, "truncate"),
            rotate=Magnitude(0, 30, "truncate"),
            shear=Magnitude(0, 0.3),
            solarize=Magnitude(256, -256, "truncate"),
            translate=Magnitude(0, 10, "truncate", "pixels"),
        ),
        gray_fill=True,
        cutout=CutOut(pixels=16),
    ),
    "author": Variant(
        num_ops=2,
        apply_probability=0.5,
        strength="level",
        signed=True,
        magnitudes=_magnitudes(
            factor=Magnitude(0.1, 1.8),
            posterize=Magnitude(4, -4, "truncate"),
            rotate=Magnitude(0, 30, "truncate"),
            shear=Magnitude(0, 0.3),
            solarize=Magnitude(256, -256, "truncate"),
            translate=Magnitude(0, 0.3, "nearest", "whole_pixels"),
        ),
        gray_fill=False,
        cutout=CutOut(pixels=16, end_included=True),
    ),
    "kekmodel": Variant(
        num_ops=2,
        apply_probability=0.5,
        strength="level",
        signed=True,
        magnitudes=_magnitudes(
            factor=Magnitude(0.05, 0.9),
            posterize=Magnitude(4, 4, "truncate"),
            rotate=Magnitude(0, 30, "truncate"),
            shear=Magnitude(0, 0.3),
            solarize=Magnitude(256, -256, "truncate"),
            translate=Magnitude(0, 0.3, "truncate", "whole_pixels"),
        ),
        gray_fill=False,
        cutout=CutOut(pixels=16, end_included=True),
    ),
    "usb": Variant(
        num_ops=3,
        apply_probability=1.0,
        strength="uniform",
        signed=False,
        magnitudes=_magnitudes(
            factor=Magnitude(0.05, 0.9),
            posterize=Magnitude(4, 4, "truncate"),
            rotate=Magnitude(-30, 60),
            shear=Magnitude(-0.3, 0.6),
            solarize=Magnitude(0, 256),
            translate=Magnitude(-0.3, 0.6),
        ),
        gray_fill=False,
        cutout=CutOut(smallest=0.0, largest=0.5, end_included=True, color=(125, 123, 114)),
    ),
    "featmatch": Variant(
        num_ops=2,
        apply_probability=1.0,
        strength="uniform",
        signed=True,
        magnitudes=_magnitudes(
            factor=Magnitude(0.1, 1.8),
            posterize=Magnitude(4, 4, "nearest"),
            rotate=Magnitude(0, 30),
            shear=Magnitude(0, 0.3),
            solarize=Magnitude(0, 256),
            translate=Magnitude(0, 150 / 331),
        ),
        gray_fill=False,
        cutout=CutOut(),
        operations=FEATMATCH_OPERATIONS,
    ),
}
