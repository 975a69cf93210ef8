"""Pictures for tests: small ones in every format and mode, and broken ones of every kind."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]


def pixels(seed: int, width: int = 24, height: int = 24, channels: int = 3) -> Pixels:
    """Smooth random colors: uint8 (height, width, channels)."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, channels), np.uint8)
    picture = Image.fromarray(coarse if channels > 1 else coarse[..., 0])
    return np.asarray(picture.resize((width, height), Image.Resampling.BICUBIC)).reshape(height, width, channels)


def picture(seed: int, mode: str = "RGB", width: int = 24, height: int = 24) -> Image.Image:
    """A picture of any mode."""
    color = Image.fromarray(pixels(seed, width, height))
    if mode == "I;16":
        return Image.fromarray(np.asarray(color.convert("L")).astype(np.uint16) * 257)
    if mode in ("RGBA", "LA"):
        color.putalpha(Image.fromarray(pixels(seed + 1, width, height, 1)[..., 0]))
    return color.convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """The bytes of a picture file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def oriented(image: Image.Image, orientation: int, kind: str = "JPEG", **options: object) -> bytes:
    """A picture file whose EXIF data ask for a turn."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif, **options)


def seed_of(path: str) -> int:
    """The seed of the picture that `draw` writes to a path."""
    return zlib.crc32(path.encode())


def draw(folder: Path, *paths: str, mode: str = "RGB", size: tuple[int, int] = (16, 16)) -> None:
    """Write a PNG to each path below `folder`, every one of its own pixels."""
    for path in paths:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(seed_of(path), mode, *size), "PNG"))


def draw_photos(root: Path) -> Path:
    """A folder with two classes, three unlabeled pictures, two for testing."""
    draw(root, "labeled/dog/b.png", "labeled/dog/a.png", "labeled/cat/1.png")
    draw(root, "unlabeled/z.png", "unlabeled/deep/er/y.png", "unlabeled/x.png", "test/cat/t.png", "test/dog/t.png")
    return root


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def animated(seed: int, kind: str) -> bytes:
    frames = [picture(seed + number) for number in range(3)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


def png(width: int, height: int, bits: int, color_type: int, content: bytes) -> bytes:
    """A PNG made by hand, so that its header can lie."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(content)) + chunk(b"IEND", b"")


def deep_color(seed: int) -> bytes:
    """A 16-bit color PNG."""
    values = pixels(seed).astype(">u2") * 257
    return png(24, 24, 16, 2, b"".join(b"\0" + row.astype(">u2").tobytes() for row in values))


def keyed(seed: int, mode: str) -> bytes:
    """A PNG in which one color is transparent."""
    image = picture(seed, mode)
    return encoded(image, "PNG", transparency=image.getpixel((0, 0)))


HEALTHY: list[tuple[str, Callable[[int], bytes]]] = [
    *((f"{mode}.jpg", lambda seed, mode=mode: encoded(picture(seed, mode), "JPEG")) for mode in ("L", "RGB", "CMYK")),
    *((f"turn{turn}.JPEG", lambda seed, turn=turn: oriented(picture(seed), turn)) for turn in range(1, 9)),
    ("progressive.jpg", lambda seed: encoded(picture(seed), "JPEG", progressive=True)),
    *(
        (f"{mode.replace(';', '')}.png", lambda seed, mode=mode: encoded(picture(seed, mode), "PNG"))
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    ),
    ("deep.png", deep_color),
    ("palette key.png", lambda seed: keyed(seed, "P")),
    ("gray key.png", lambda seed: keyed(seed, "L")),
    ("color key.png", lambda seed: keyed(seed, "RGB")),
    ("moving.png", lambda seed: animated(seed, "PNG")),
    *((f"{mode}.webp", lambda seed, mode=mode: encoded(picture(seed, mode), "WEBP")) for mode in ("RGB", "RGBA")),
    ("lossless.WebP", lambda seed: encoded(picture(seed), "WEBP", lossless=True)),
    ("moving.webp", lambda seed: animated(seed, "WEBP")),
    *((f"{mode}.bmp", lambda seed, mode=mode: encoded(picture(seed, mode), "BMP")) for mode in ("1", "L", "P", "RGB")),
    *(
        (f"{mode.replace(';', '')}.tif", lambda seed, mode=mode: encoded(picture(seed, mode), "TIFF"))
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F")
    ),
    ("lzw.TIFF", lambda seed: encoded(picture(seed), "TIFF", compression="tiff_lzw")),
    ("jpeg.tif", lambda seed: encoded(picture(seed), "TIFF", compression="jpeg")),
    ("turned.tif", lambda seed: oriented(picture(seed), 6, "TIFF")),
    ("pages.tif", lambda seed: animated(seed, "TIFF")),
    *((f"{mode}.gif", lambda seed, mode=mode: encoded(picture(seed, mode), "GIF")) for mode in ("L", "P")),
    ("moving.gif", lambda seed: animated(seed, "GIF")),
    ("a PNG in truth.jpg", lambda seed: encoded(picture(seed), "PNG")),
    ("a JPEG in truth.png", lambda seed: encoded(picture(seed), "JPEG")),
    ("wide.jpg", lambda seed: encoded(picture(seed, "RGB", 60, 30), "JPEG")),
    ("tall.png", lambda seed: encoded(picture(seed, "RGB", 9, 50), "PNG")),
    ("dot.png", lambda seed: encoded(picture(seed, "RGB", 1, 1), "PNG")),
]


def _half(kind: str, mode: str = "RGB", **options: object) -> bytes:
    content = encoded(picture(5, mode, 64, 64), kind, **options)
    return content[: len(content) // 2]


def _claiming(kind: str, side: int = 30_000) -> bytes:
    """A file whose header claims `side` x `side` pixels."""
    content = bytearray(encoded(picture(1, "L" if kind == "TIFF" else "RGB"), kind))
    if kind == "BMP":
        struct.pack_into("<ii", content, 18, side, side)
    elif kind == "GIF":
        struct.pack_into("<HH", content, 6, side, side)
    elif kind == "JPEG":
        struct.pack_into(">HH", content, content.index(b"\xff\xc0") + 5, side, side)
    elif kind == "TIFF":
        for tag in (256, 257):
            place = content.index(struct.pack("<HHI", tag, 4, 1))
            struct.pack_into("<I", content, place + 8, side)
    elif kind == "WEBP":
        extended = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + struct.pack("<I", side - 1)[:3] * 2
        content[12:12] = extended
        struct.pack_into("<I", content, 4, len(content) - 8)
    return bytes(content)


def _damaged(kind: str, mode: str = "RGB") -> bytes:
    """A file whose middle is overwritten."""
    content = bytearray(encoded(picture(6, mode, 64, 64), kind))
    middle = len(content) // 2
    content[middle - 20 : middle + 20] = b"\xff" * 40
    return bytes(content)


def broken_pictures() -> dict[str, bytes]:
    """Fifty files that no reader can make a picture of, by name."""
    broken = {f"half.{kind.lower()}": _half(kind) for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")}
    broken |= {f"half {mode}.png": _half("PNG", mode) for mode in ("L", "P", "RGBA", "I;16")}
    broken |= {f"half {mode}.jpg": _half("JPEG", mode) for mode in ("L", "CMYK")}
    broken |= {f"half {mode}.tif": _half("TIFF", mode) for mode in ("1", "L", "I;16", "F")}
    broken |= {f"half {name}.tif": _half("TIFF", compression=name) for name in ("tiff_lzw", "tiff_deflate", "jpeg")}
    broken |= {f"half {mode}.bmp": _half("BMP", mode) for mode in ("L", "P")}
    broken |= {"half moving.gif": animated(7, "GIF")[:900], "half moving.webp": animated(7, "WEBP")[:200]}
    broken |= {f"empty.{ending}": b"" for ending in ("jpg", "PNG", "webp", "bmp", "tif", "gif")}
    broken |= {f"text.{ending}": b"cat,dog\n" * 100 for ending in ("jpg", "png", "webp", "bmp", "tif", "gif")}
    broken |= {f"huge.{kind.lower()}": _claiming(kind) for kind in ("JPEG", "BMP", "TIFF", "GIF", "WEBP")}
    broken |= {
        "huge.png": png(30_000, 30_000, 8, 2, b""),
        "large.png": png(10_000, 10_000, 8, 2, b""),
        "too large.png": png(7_200, 7_200, 8, 2, b""),
        "thread.png": png(4_000_000, 1, 1, 0, bytes(500_001)),
        "nothing.png": png(0, 0, 8, 2, b""),
        "damaged.png": _damaged("PNG"),
        "start.jpg": b"\xff\xd8\xff\xe0",
        "page.jpg": b"<!doctype html><title>404</title>",
        "icon.png": encoded(picture(8), "ICO"),
        "plain.bmp": encoded(picture(10), "PPM"),
    }
    return broken


def write_corpus(folder: Path, count: int = 1_000, broken: bool = True) -> set[str]:
    """`count` pictures in labeled/, unlabeled/ and test/, among them the fifty broken ones, whose paths are returned.

    Without `broken`, healthy pictures take their places.
    """
    bad = list(broken_pictures().items())
    named = set()
    for number in range(count):
        part = ("unlabeled", "unlabeled/more", "labeled/cat", "labeled/dog", "test/cat", "test/dog")[number % 6]
        at, place = divmod(number, count // len(bad))
        if broken and place == at % min(7, count // len(bad)):
            name, content = bad[at]
            named.add(f"{part}/{number:04} {name}")
        else:
            name, make = HEALTHY[number % len(HEALTHY)]
            content = make(number)
        path = folder / part / f"{number:04} {name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return named
