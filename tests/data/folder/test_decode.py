"""Decoding of single pictures: formats, modes, orientation, size; broken ones get a short reason."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_corpus import HEALTHY, broken_pictures, encoded, oriented, picture, pixels, png, written
from PIL import Image, ImageOps

from crmatch.data.folder.decode import MOST_PIXELS, PictureError, choose_size, decode, decode_picture
from crmatch.data.folder.scan import find_pictures
from crmatch.data.folder.workers import decode_pictures
from crmatch.data.images import resize

LOSSLESS = [("PNG", "png", {}), ("BMP", "bmp", {}), ("TIFF", "tif", {}), ("WEBP", "webp", {"lossless": True})]


@pytest.mark.parametrize(("kind", "ending", "options"), LOSSLESS)
def test_lossless_color_comes_out_as_it_went_in(tmp_path: Path, kind: str, ending: str, options: dict[str, object]) -> None:
    path = written(tmp_path / f"a.{ending}", encoded(picture(3), kind, **options))
    assert (decode_picture(path, 24, 3) == pixels(3)).all()


def test_sixteen_bits_keep_their_high_byte(tmp_path: Path) -> None:
    gray = np.asarray(picture(3, "L"))
    for kind in ("PNG", "TIFF"):
        path = written(tmp_path / kind, encoded(picture(3, "I;16"), kind))
        assert (decode_picture(path, 24, 1)[..., 0] == gray).all()
        assert (decode_picture(path, 24, 3) == gray[..., None]).all()
    assert (decode_picture(written(tmp_path / "color.png", dict(HEALTHY)["deep.png"](3)), 24, 3) == pixels(3)).all()


def test_the_range_of_wide_values_is_stretched(tmp_path: Path) -> None:
    values = np.linspace(-3, 7, 64, dtype=np.float32).reshape(8, 8)
    expected = np.rint(np.linspace(0, 255, 64)).astype(np.uint8).reshape(8, 8)
    image = encoded(Image.fromarray(values), "TIFF")
    assert (decode_picture(written(tmp_path / "a.tif", image), 8, 1)[..., 0] == expected).all()
    values[0, 0] = np.nan
    decode_picture(written(tmp_path / "b.tif", encoded(Image.fromarray(values), "TIFF")), 8, 1)
    flat = encoded(Image.fromarray(np.full((8, 8), 5, np.int32)), "TIFF")
    assert not decode_picture(written(tmp_path / "c.tif", flat), 8, 1).any()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_shows_white(tmp_path: Path, mode: str) -> None:
    image = picture(3, mode)
    alpha = np.asarray(image)[..., -1:].astype(float) / 255
    expected = np.asarray(image.convert("RGB")).astype(float) * alpha + 255 * (1 - alpha)
    found = decode_picture(written(tmp_path / "a.png", encoded(image, "PNG")), 24, 3)
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_color_shows_white(tmp_path: Path, mode: str) -> None:
    image = picture(3, mode)
    key = image.getpixel((0, 0))
    path = written(tmp_path / "a.png", encoded(image, "PNG", transparency=key))
    hidden = (np.asarray(image).reshape(24, 24, -1) == np.array(key)).all(axis=2)
    expected = np.where(hidden[..., None], 255, np.asarray(image.convert("RGB")))
    assert (decode_picture(path, 24, 3) == expected).all()


def test_gray_is_told_from_color_by_mode_and_palette(tmp_path: Path) -> None:
    modes = {"a.png": "L", "b.png": "1", "c.png": "I;16", "d.png": "LA", "gray palette.gif": "L", "e.png": "RGB", "f.png": "P"}
    paths = [written(tmp_path / name, encoded(picture(1, mode), name[-3:].upper())) for name, mode in modes.items()]
    assert [decode(str(path), 24, 3)[1].gray for path in paths] == [True] * 5 + [False] * 2
    assert choose_size(paths[:5]) == (24, 1)
    assert choose_size(paths) == (24, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_comes_out_upright(tmp_path: Path, kind: str, orientation: int) -> None:
    content = oriented(picture(4, "RGB", 32, 24), orientation, kind)
    with Image.open(io.BytesIO(content)) as stored:
        upright = ImageOps.exif_transpose(stored)
    values = torch.from_numpy(np.array(upright)).permute(2, 0, 1)
    path = written(tmp_path / f"a.{kind.lower()}", content)
    assert (decode_picture(path, 24, 3) == resize(values[None], 24)[0].permute(1, 2, 0).numpy()).all()
    facts = decode(str(path), 24, 3)[1]
    assert (facts.width, facts.height) == upright.size


def test_damaged_exif_costs_only_the_orientation(tmp_path: Path) -> None:
    content = encoded(picture(4), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f nonsense")
    expected = decode_picture(written(tmp_path / "b.jpg", encoded(picture(4), "JPEG")), 24, 3)
    assert (decode_picture(written(tmp_path / "a.jpg", content), 24, 3) == expected).all()


def test_moving_pictures_show_their_first_frame(tmp_path: Path) -> None:
    for name, tolerance in (("moving.png", 0), ("pages.tif", 0), ("moving.gif", 12), ("moving.webp", 12)):
        path = written(tmp_path / name, dict(HEALTHY)[name](3))
        assert np.abs(decode_picture(path, 24, 3) - pixels(3).astype(int)).mean() <= tolerance


@pytest.mark.parametrize(("width", "height"), [(28, 28), (96, 64), (64, 96), (48, 64), (33, 200), (7, 5), (1, 1), (101, 99)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resizing_equals_that_of_the_packed_sets(tmp_path: Path, width: int, height: int, channels: int) -> None:
    values = np.random.default_rng(width).integers(0, 256, (height, width, channels), np.uint8)
    image = Image.fromarray(values if channels == 3 else values[..., 0])
    path = written(tmp_path / "a.png", encoded(image, "PNG"))
    for size in (8, 28, 32, 64, 97):
        expected = resize(torch.from_numpy(values)[None].permute(0, 3, 1, 2), size)
        assert (torch.from_numpy(decode_picture(path, size, channels)).permute(2, 0, 1) == expected[0]).all()


@pytest.mark.parametrize(
    ("sizes", "side"),
    [([(96, 64)], 64), ([(30, 40), (50, 60), (500, 100)], 50), ([(2, 2)], 8), ([(600, 700)], 512)],
)
def test_the_chosen_size_is_the_median_shorter_side_within_bounds(
    tmp_path: Path, sizes: list[tuple[int, int]], side: int
) -> None:
    contents = [encoded(picture(1, "RGB", *size), "PNG") for size in sizes]
    paths = [written(tmp_path / f"{number}.png", content) for number, content in enumerate(contents)]
    assert choose_size(paths) == (side, 3)


def test_broken_pictures_get_a_short_reason(tmp_path: Path) -> None:
    reasons = {}
    for name, content in broken_pictures().items():
        with pytest.raises(PictureError) as caught:
            decode_picture(written(tmp_path / name, content), 24, 3)
        reasons[name] = str(caught.value)
        assert "\n" not in reasons[name]
        assert len(reasons[name]) < 100
    assert len(reasons) == 50
    assert reasons["half.jpeg"] == "truncated"
    assert reasons["empty.jpg"] == "empty file"
    assert reasons["huge.png"] == reasons["large.png"] == reasons["huge.webp"] == "more than 50 million pixels"
    assert reasons["thread.png"] == "too long and narrow (4000000x1)"
    assert reasons["text.png"] == "not a readable JPEG, PNG, WebP, BMP, TIFF or GIF picture"


def test_a_header_may_claim_anything_up_to_the_cap(tmp_path: Path) -> None:
    """The largest picture allowed is read; one row more is refused before anything is decoded."""
    largest = png(10_000, 5_000, 1, 0, bytes(1_251 * 5_000))
    assert not decode_picture(written(tmp_path / "a.png", largest), 8, 1).any()
    with pytest.raises(PictureError, match="million pixels"):
        decode_picture(written(tmp_path / "b.png", png(10_000, 5_001, 1, 0, b"")), 8, 1)


@pytest.mark.process
@pytest.mark.parametrize("progressive", [False, True])
def test_a_panorama_is_read_at_a_fraction_of_its_size(tmp_path: Path, progressive: bool) -> None:
    """200 million pixels: more than Pillow opens by default."""
    width, height = 40_000, 5_000
    wide = picture(3, "RGB", 400, 50)
    content = encoded(wide.resize((width, height), Image.Resampling.NEAREST), "JPEG", quality=50, progressive=progressive)
    pixels, (facts,) = decode_pictures([written(tmp_path / "wide.jpg", content)], 48, 3)
    if progressive:
        assert facts == "more than 50 million pixels"
    else:
        assert not isinstance(facts, str)
        assert facts.width * facts.height <= MOST_PIXELS
        expected = decode_picture(written(tmp_path / "small.png", encoded(wide, "PNG")), 48, 3)
        assert np.abs(pixels[0].astype(int) - expected).mean() < 4


@pytest.mark.process
def test_pictures_of_iphones_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif", reason="needs the extra heic")
    (tmp_path / "a.heic").write_bytes(encoded(picture(1, "RGB", 64, 48), "HEIF", quality=95))
    assert find_pictures(tmp_path) == [tmp_path / "a.heic"]
    pixels, _ = decode_pictures([tmp_path / "a.heic"], 48, 3)
    expected = decode_picture(written(tmp_path / "a.png", encoded(picture(1, "RGB", 64, 48), "PNG")), 48, 3)
    assert np.abs(pixels[0].astype(int) - expected).mean() < 6
