"""Decoding of picture files into square uint8 pixels. Imports no torch.

A picture may be damaged or hostile. Whatever a decoder raises becomes a `PictureError` with a short reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from crmatch.data.square import SMALLEST_SIDE, covering_size, square
from crmatch.errors import DataError

try:  # pictures of iPhones; the extra `heic`
    import pillow_heif

    pillow_heif.register_heif_opener()
    has_heic = True
except ImportError:
    has_heic = False
HEIC_EXTENSIONS = (".heic", ".heif")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", *(("HEIF",) if has_heic else ()))
EXTENSIONS = frozenset((".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"))
EXTENSIONS |= {*HEIC_EXTENSIONS} if has_heic else set()
MOST_PIXELS = 50_000_000
MOST_BYTES = 1 << 29
SHORTEST_JPEG = 256  # pixels per byte
LARGEST_CHOSEN_SIDE = 512
HEADERS = 1000
"""Number of pictures whose headers `choose_size` reads."""
DECODER = 2
"""Version of the decoder, part of every cache's name; increase it when the pixels of any picture change."""
_EXIF = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}
Pixels = NDArray[np.uint8]


class Facts(NamedTuple):
    """Properties of a readable picture: upright size, whether it is stored as gray, and a hash of its decoded pixels."""

    width: int
    height: int
    gray: bool
    digest: int


FACTS = np.dtype([("width", np.int32), ("height", np.int32), ("gray", np.bool_), ("digest", np.uint64)])
"""The dtype of an array of `Facts`."""


class PictureError(DataError):
    """A picture that cannot be used; the message is the short reason."""


@contextlib.contextmanager
def open_picture(source: str | Path | BytesIO) -> Iterator[Image.Image]:
    """Open a picture after its header was checked; any exception, also in the caller's block, becomes a `PictureError`."""
    try:
        length = source.getbuffer().nbytes if isinstance(source, BytesIO) else os.stat(source).st_size
        if not 0 < length <= MOST_BYTES:
            raise PictureError(f"larger than {MOST_BYTES >> 20} MiB" if length else "empty file")
        with Image.open(source, formats=FORMATS) as picture:
            pixels = picture.width * picture.height
            # A JPEG, such as a panorama, can be decoded at 1/2, 1/4 or 1/8 of its size, unless it is progressive. If the file
            # is shorter than any JPEG of this size, its header lies.
            if MOST_PIXELS < pixels < SHORTEST_JPEG * length and not picture.info.get("progressive"):
                scale = 2 ** math.ceil(math.log2(pixels / MOST_PIXELS) / 2)
                picture.draft(None, (picture.width // scale, picture.height // scale))
            if picture.width * picture.height > MOST_PIXELS:
                raise Image.DecompressionBombError
            yield picture
    except PictureError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds of exceptions on damaged files
        raise PictureError(_reason(error)) from error


def decode_picture(path: Path | str, size: int, channels: int) -> Pixels:
    """Decode one picture as uint8 (size, size, channels).

    Takes the first frame, upright by its EXIF orientation, with transparency on white and the high byte of 16-bit gray, and
    makes it square like `crmatch.data.images.resize`.

    Raises:
        PictureError: the picture is damaged, too large, or of another format.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content, _ = decode(str(path), size, channels)
    return np.frombuffer(bytearray(content), np.uint8).reshape(size, size, channels)


def decode(path: str, size: int, channels: int) -> tuple[bytes, Facts]:
    """Pixels and facts of a picture, as `decode_picture` describes them; may issue warnings."""
    with open_picture(path) as picture:
        return decode_image(picture, size, channels)


def decode_image(picture: Image.Image, size: int, channels: int) -> tuple[bytes, Facts]:
    """Pixels and facts of a picture that Pillow has opened; the picture itself may be rotated by this."""
    picture.load()
    if not _EXIF.isdisjoint(picture.info):  # looking for EXIF data in every picture would take long
        with contextlib.suppress(Exception):  # damaged EXIF data do not affect the pixels
            ImageOps.exif_transpose(picture, in_place=True)
    gray = _is_gray(picture)
    width, height = covering_size(*picture.size, size)
    if width * height > MOST_PIXELS and picture.size != (size, size):
        raise PictureError(f"too long and narrow ({picture.width}x{picture.height})")
    image, mode = flat(picture), "L" if channels == 1 else "RGB"
    content = square(image if image.mode == mode else image.convert(mode), size).tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return content, Facts(*picture.size, gray, int.from_bytes(digest))


def choose_size(pictures: Sequence[Path | str | Image.Image]) -> tuple[int, int]:
    """(image size, channels) that suit files or Pillow's pictures, from at most 1,000 headers, evenly spaced.

    The size is the median shorter side within 8..512. The channels are a first guess: 1 if every header says gray.
    """
    sides, gray = [], True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in pictures[:: max(1, -(-len(pictures) // HEADERS))]:
            opened = contextlib.nullcontext(one) if isinstance(one, Image.Image) else open_picture(one)
            with contextlib.suppress(PictureError), opened as picture:
                sides.append(min(picture.size))
                gray = gray and _is_gray(picture)
    side = int(np.median(sides)) if sides else SMALLEST_SIDE
    return min(max(side, SMALLEST_SIDE), LARGEST_CHOSEN_SIDE), 1 if gray else 3


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if isinstance(error, UnidentifiedImageError):
        return "not a readable JPEG, PNG, WebP, BMP, TIFF or GIF picture"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MOST_PIXELS // 1_000_000} million pixels"
    if "truncated" in text.lower() or isinstance(error, EOFError):
        return "truncated"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"damaged ({text[:80] or type(error).__name__})"


def _is_gray(picture: Image.Image) -> bool:
    """Whether the picture is stored as gray, by its mode or by a palette of grays."""
    if picture.mode in ("P", "PA"):
        colors = picture.getpalette("RGB") or []
        return colors[0::3] == colors[1::3] == colors[2::3]
    return picture.mode in ("1", "L", "LA", "La", "F") or picture.mode.startswith("I")


def flat(picture: Image.Image) -> Image.Image:
    """The picture with eight bits per channel and without transparency: the background is white.

    16-bit gray keeps its high byte, as Pillow does for 16-bit color. 32-bit integers and floats have no fixed white, so
    the range of each such picture is stretched to 0..255.
    """
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        values = np.nan_to_num(np.asarray(picture, np.float32), posinf=0, neginf=0)
        low, high = float(values.min()), float(values.max())
        return Image.fromarray(np.rint((values - low) * (255 / ((high - low) or 1))).astype(np.uint8))
    if not picture.has_transparency_data:
        return picture
    opaque = Image.new("RGBA", picture.size, "white")
    opaque.alpha_composite(picture.convert("RGBA"))
    return opaque.convert("RGB")
