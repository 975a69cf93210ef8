"""RandAugment's variants as one table: what each code base draws. Imports no torch.

All variants draw operations uniformly with replacement and end with CutOut; they differ in everything else. `paper` is the
table printed in CR-Match's appendix; `google` is google-research/fixmatch; `author` is YUE-FAN/FixMatch-PyTorch; `kekmodel` is
kekmodel/FixMatch-pytorch; `usb` is microsoft/Semi-supervised-learning; `featmatch` is GT-RIPL/FeatMatch, whose level 0..9 and
position within the level together are a uniform strength. FeatMatch warps bicubically around the center; here its warps use
nearest neighbors, like all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

RANDAUGMENT_OPERATIONS = (
    "autocontrast", "brightness", "color", "contrast", "equalize", "identity", "posterize",
    "rotate", "sharpness", "shear_x", "shear_y", "solarize", "translate_x", "translate_y",
)  # fmt: skip
HIGHEST_LEVEL = 9
LEVEL_SCALE = 10


class Magnitude(NamedTuple):
    """How an operation's value follows from a strength s: value = start + rounding(span * s).

    Attributes:
        start: value at strength 0.
        span: change of the value from strength 0 to strength 1.
        rounding: of span * s; `truncate` is Python's `int`, `nearest` rounds half to even.
        unit: `value` is the operation's own unit; `pixels` means that `span` is in pixels; `whole_pixels` means that `span`
            is a fraction of the side and that span * s is rounded in pixels.
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
        pixels: the side in pixels for any image size; 0 means that the fractions apply.
        end_included: draws like Pillow's rectangle: it includes its end pixel, and a square that would begin above or left
            of the image is moved inside instead of being clipped.
        color: of the square; gray images get its luma.
    """

    smallest: float = 0.5
    largest: float = 0.5
    pixels: int = 0
    end_included: bool = False
    color: tuple[int, int, int] = (127, 127, 127)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Everything in which one variant of RandAugment differs from the others.

    Attributes:
        num_ops: operations drawn per image.
        apply_probability: of each of them.
        strength: `uniform` draws s in [0, 1), `level` draws l in 1..9 and takes s = l / 10.
        signed: whether rotate, shear and translate get a random sign; if not, their range has both signs already.
        factor: magnitude of brightness, color, contrast and sharpness. The next five are named after their operations; shear
            and translate serve both axes.
        gray_fill: whether areas that a warp uncovers end gray instead of black.
        cutout: the final square.
        operations: names of the operations that are drawn.
    """

    num_ops: int
    apply_probability: float
    strength: Literal["uniform", "level"]
    signed: bool
    factor: Magnitude
    posterize: Magnitude
    rotate: Magnitude
    shear: Magnitude
    solarize: Magnitude
    translate: Magnitude
    cutout: CutOut
    gray_fill: bool = False
    operations: tuple[str, ...] = RANDAUGMENT_OPERATIONS

    @property
    def magnitudes(self) -> dict[str, Magnitude]:
        """The magnitude of each operation that takes a value."""
        factors = dict.fromkeys(("brightness", "color", "contrast", "sharpness"), self.factor)
        shears = dict.fromkeys(("shear_x", "shear_y"), self.shear)
        translations = dict.fromkeys(("translate_x", "translate_y"), self.translate)
        others = {"posterize": self.posterize, "rotate": self.rotate, "solarize": self.solarize}
        return factors | shears | translations | others


_PAPER = Variant(
    num_ops=2,
    apply_probability=1.0,
    strength="uniform",
    signed=False,
    factor=Magnitude(0.05, 0.9),
    posterize=Magnitude(4, 5, "truncate"),
    rotate=Magnitude(-30, 60),
    shear=Magnitude(-0.3, 0.6),
    solarize=Magnitude(0, 256),
    translate=Magnitude(-0.3, 0.6),
    cutout=CutOut(),
)
_GOOGLE = Variant(
    num_ops=2,
    apply_probability=0.5,
    strength="level",
    signed=True,
    factor=Magnitude(0.1, 1.8),
    posterize=Magnitude(4, -4, "truncate"),
    rotate=Magnitude(0, 30, "truncate"),
    shear=Magnitude(0, 0.3),
    solarize=Magnitude(256, -256, "truncate"),
    translate=Magnitude(0, 10, "truncate", "pixels"),
    cutout=CutOut(pixels=16),
    gray_fill=True,
)
_AUTHOR = replace(
    _GOOGLE,
    translate=Magnitude(0, 0.3, "nearest", "whole_pixels"),
    cutout=CutOut(pixels=16, end_included=True),
    gray_fill=False,
)
_KEKMODEL = replace(
    _AUTHOR,
    factor=Magnitude(0.05, 0.9),
    posterize=Magnitude(4, 4, "truncate"),
    translate=Magnitude(0, 0.3, "truncate", "whole_pixels"),
)
_USB = replace(
    _PAPER,
    num_ops=3,
    posterize=Magnitude(4, 4, "truncate"),
    cutout=CutOut(smallest=0.0, largest=0.5, end_included=True, color=(125, 123, 114)),
)
_FEATMATCH = replace(
    _PAPER,
    signed=True,
    factor=Magnitude(0.1, 1.8),
    posterize=Magnitude(4, 4, "nearest"),
    rotate=Magnitude(0, 30),
    shear=Magnitude(0, 0.3),
    translate=Magnitude(0, 150 / 331),
    operations=(*RANDAUGMENT_OPERATIONS, "invert", "mirror"),
)
VARIANTS = {"paper": _PAPER, "google": _GOOGLE, "author": _AUTHOR, "kekmodel": _KEKMODEL, "usb": _USB, "featmatch": _FEATMATCH}
