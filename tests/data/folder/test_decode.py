from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_corpus import (
    HEALTHY,
    broken_pictures,
    encoded,
    oriented,
    picture,
    pixels,
    png,
    write_corpus,
)
from PIL import Image, ImageOps

from crmatch.data.folder.decode import Facts, PictureError, choose_size, decode_picture
from crmatch.data.folder.workers import decode_pictures, decode_rows
from crmatch.data.images import resize
from crmatch.errors import DataError


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


LOSSLESS = [("PNG", "png", {}), ("BMP", "bmp", {}), ("TIFF", "tif", {}), ("WEBP", "webp", {"lossless": True})]


@pytest.mark.parametrize(("kind", "ending", "options"), LOSSLESS)
def test_lossless_color_comes_out_as_it_went_in(tmp_path: Path, kind: str, ending: str, options: dict[str, object]) -> None:
    path = written(tmp_path / f"a.{ending}", encoded(picture(3), kind, **options))
    assert (decode_picture(path, 24, 3) == pixels(3)).all()


def test_sixteen_bits_keep_their_high_byte(tmp_path: Path) -> None:
    gray = np.asarray(picture(3, "L"))
    for ending, kind in (("png", "PNG"), ("tif", "TIFF")):
        path = written(tmp_path / f"gray.{ending}", encoded(picture(3, "I;16"), kind))
        assert (decode_picture(path, 24, 1)[..., 0] == gray).all()
        assert (decode_picture(path, 24, 3) == gray[..., None]).all()
    deep = dict(HEALTHY)["deep.png"](3)
    assert (decode_picture(written(tmp_path / "color.png", deep), 24, 3) == pixels(3)).all()


def test_wide_values_are_spread_over_their_own_range(tmp_path: Path) -> None:
    values = np.linspace(-3, 7, 64, dtype=np.float32).reshape(8, 8)
    expected = np.rint(np.linspace(0, 255, 64)).astype(np.uint8).reshape(8, 8)
    image = Image.fromarray(values)
    assert (decode_picture(written(tmp_path / "a.tif", encoded(image, "TIFF")), 8, 1)[..., 0] == expected).all()
    values[0, 0] = np.nan
    decode_picture(written(tmp_path / "b.tif", encoded(Image.fromarray(values), "TIFF")), 8, 1)
    flat = encoded(Image.fromarray(np.full((8, 8), 5, np.int32)), "TIFF")
    assert not decode_picture(written(tmp_path / "c.tif", flat), 8, 1).any()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_shows_white(tmp_path: Path, mode: str) -> None:
    image = picture(3, mode)
    alpha = np.asarray(image)[..., -1:].astype(float) / 255
    color = np.asarray(image.convert("RGB")).astype(float)
    expected = color * alpha + 255 * (1 - alpha)
    found = decode_picture(written(tmp_path / "a.png", encoded(image, "PNG")), 24, 3)
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("mode", ["P", "L", "RGB"])
def test_a_transparent_color_shows_white(tmp_path: Path, mode: str) -> None:
    image = picture(3, mode)
    key = image.getpixel((0, 0))
    path = written(tmp_path / "a.png", encoded(image, "PNG", transparency=key))
    values = np.asarray(image).reshape(24, 24, -1)
    hidden = (values == np.array(key)).all(axis=2)
    found = decode_picture(path, 24, 3)
    assert hidden.any()
    assert (found[hidden] == 255).all()
    assert (found[~hidden] == np.asarray(image.convert("RGB"))[~hidden]).all()


def test_gray_is_told_from_color_by_mode_and_palette(tmp_path: Path) -> None:
    paths = []
    for name, image in {
        "gray.png": picture(1, "L"),
        "one bit.png": picture(1, "1"),
        "deep.png": picture(1, "I;16"),
        "alpha.png": picture(1, "LA"),
        "gray palette.gif": picture(1, "L"),
        "color.png": picture(1),
        "palette.png": picture(1, "P"),
    }.items():
        paths.append(written(tmp_path / name, encoded(image, name[-3:].upper())))
    _, facts = decode_pictures(paths, 24, 3)
    assert [fact.gray for fact in facts if isinstance(fact, Facts)] == [True] * 5 + [False] * 2
    assert choose_size(paths[:5]) == (24, 1)
    assert choose_size(paths) == (24, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_comes_out_upright(tmp_path: Path, kind: str, orientation: int) -> None:
    content = oriented(picture(4), orientation, kind)
    with Image.open(io.BytesIO(content)) as stored:
        expected = np.asarray(ImageOps.exif_transpose(stored))
    path = written(tmp_path / f"a.{kind.lower()}", content)
    assert (decode_picture(path, 24, 3) == expected).all()


def test_a_portrait_stored_lying_is_upright_and_says_its_size(tmp_path: Path) -> None:
    scene = np.zeros((64, 48, 3), np.uint8)
    scene[:32] = 255
    lying = Image.fromarray(scene).transpose(Image.Transpose.ROTATE_90)
    path = written(tmp_path / "photo.jpg", oriented(lying, 6, quality=95))
    (found,), (facts,) = decode_pictures([path], 48, 3)
    assert isinstance(facts, Facts)
    assert (facts.width, facts.height) == (48, 64)
    assert found[:20].min() > 240
    assert found[28:].max() < 15


def test_damaged_exif_costs_only_the_orientation(tmp_path: Path) -> None:
    content = encoded(picture(4), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f nonsense")
    expected = decode_picture(written(tmp_path / "b.jpg", encoded(picture(4), "JPEG")), 24, 3)
    assert (decode_picture(written(tmp_path / "a.jpg", content), 24, 3) == expected).all()


def test_moving_pictures_show_their_first_frame(tmp_path: Path) -> None:
    for name in ("moving.png", "pages.tif"):
        path = written(tmp_path / name, dict(HEALTHY)[name](3))
        assert (decode_picture(path, 24, 3) == pixels(3)).all()
    for name in ("moving.gif", "moving.webp"):
        path = written(tmp_path / name, dict(HEALTHY)[name](3))
        assert np.abs(decode_picture(path, 24, 3) - pixels(3).astype(int)).mean() < 12


@pytest.mark.parametrize(("width", "height"), [(28, 28), (96, 64), (64, 96), (48, 64), (33, 200), (7, 5), (1, 1), (101, 99)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resizing_equals_that_of_the_packed_sets(tmp_path: Path, width: int, height: int, channels: int) -> None:
    values = np.random.default_rng(width).integers(0, 256, (height, width, channels), np.uint8)
    image = Image.fromarray(values if channels == 3 else values[..., 0])
    path = written(tmp_path / "a.png", encoded(image, "PNG"))
    for size in (8, 28, 32, 64, 97):
        expected = resize(torch.from_numpy(values)[None].permute(0, 3, 1, 2), size)
        found = decode_picture(path, size, channels)
        assert (torch.from_numpy(found).permute(2, 0, 1) == expected[0]).all()


def test_the_chosen_size_is_the_median_shorter_side_within_bounds(tmp_path: Path) -> None:
    def sized(*shapes: tuple[int, int]) -> tuple[int, int]:
        paths = []
        for number, (width, height) in enumerate(shapes):
            content = encoded(picture(1, "RGB", width, height), "PNG")
            paths.append(written(tmp_path / f"{number}.png", content))
        return choose_size(paths)

    assert sized((96, 64)) == (64, 3)
    assert sized((30, 40), (50, 60), (500, 100)) == (50, 3)
    assert sized((2, 2)) == (8, 3)
    assert sized((600, 700)) == (512, 3)


def test_broken_pictures_are_named_with_a_short_reason_and_nothing_leaks(tmp_path: Path) -> None:
    broken = broken_pictures()
    assert len(broken) == 50
    paths = [written(tmp_path / name, content) for name, content in broken.items()]
    before = open_files()
    reasons = {}
    for path in paths:
        with pytest.raises(PictureError) as caught:
            decode_picture(path, 24, 3)
        reasons[path.name] = str(caught.value)
        assert "\n" not in reasons[path.name]
        assert len(reasons[path.name]) < 100
    assert reasons["half.jpeg"] == "truncated"
    assert reasons["empty.jpg"] == "empty file"
    assert reasons["huge.png"] == reasons["large.png"] == reasons["huge.webp"] == "more than 50 million pixels"
    assert reasons["thread.png"] == "too long and narrow (4000000x1)"
    assert reasons["text.png"] == "not a readable JPEG, PNG, WebP, BMP, TIFF or GIF picture"
    pixels, found = decode_pictures(paths, 24, 3)
    assert found == list(reasons.values())
    assert not pixels.any()
    assert open_files() == before


def test_files_that_are_gone_are_named(tmp_path: Path) -> None:
    _, facts = decode_pictures([tmp_path / "gone.png"], 24, 3)
    assert facts == ["no such file or directory"]


def test_many_pictures_keep_their_order(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{seed}.png", encoded(picture(seed), "PNG")) for seed in range(150)]
    found, facts = decode_pictures(paths, 24, 3)
    assert all((found[seed] == pixels(seed)).all() for seed in range(150))
    assert len({fact.digest for fact in facts if isinstance(fact, Facts)}) == 150


def test_stopping_halfway_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    jobs = [(seed, str(written(tmp_path / f"{seed}.png", encoded(picture(seed), "PNG")))) for seed in range(50)]
    target = written(tmp_path / "pixels", bytes(50 * 24 * 24 * 3))
    before = open_files()
    decoding = decode_rows(jobs, target, 24, 3, workers=2)
    assert next(decoding)
    decoding.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert open_files() == before


def fake_python(path: Path, code: str) -> str:
    """An interpreter whose decoder is changed by `code`."""
    path.with_suffix(".py").write_text(
        f"import os, sys\nfrom crmatch.data.folder import workers\nreal = workers.decode\n{code}\nworkers.work()\n"
    )
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {path.with_suffix(".py")} "$3" "$4" "$5" "$6"\n')
    path.chmod(0o755)
    return str(path)


def test_a_picture_that_crashes_the_decoder_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [written(tmp_path / f"{seed}.png", encoded(picture(seed), "PNG")) for seed in range(20)]
    code = "workers.decode = lambda path, *rest: os._exit(9) if path.endswith('/13.png') else real(path, *rest)"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", code))
    found, facts = decode_pictures(paths, 24, 3)
    assert [row for row, fact in enumerate(facts) if isinstance(fact, str)] == [13]
    assert facts[13] == "crashes the decoder"
    assert all((found[seed] == pixels(seed)).all() for seed in range(20) if seed != 13)


def test_a_full_disk_is_an_error_not_a_broken_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.png", encoded(picture(1), "PNG"))
    code = "def full(*rest): raise OSError(28, 'No space left on device')\nos.pwrite = full"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", code))
    with pytest.raises(DataError, match="No space left on device") as caught:
        decode_pictures([path], 24, 3)
    assert str(caught.value).count("\n") == 1


def test_nothing_to_decode_is_nothing() -> None:
    found, facts = decode_pictures([], 24, 3)
    assert found.shape == (0, 24, 24, 3)
    assert facts == []


def test_a_decoder_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DataError, match="does not start"):
        decode_pictures([tmp_path / "a.png"], 24, 3)


MEASURE = """
import resource, sys
from pathlib import Path
from crmatch.data.folder.cache import decode_folder
from crmatch.data.folder.scan import scan_folder
decoded = decode_folder(scan_folder(Path(sys.argv[1])), 24, Path(sys.argv[2]))
assert 'torch' not in sys.modules
print(len(decoded.broken), sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


def test_bombs_and_broken_pictures_need_no_more_memory_than_clean_ones(tmp_path: Path) -> None:
    peak = {}
    for name, bad in (("clean", False), ("broken", True)):
        write_corpus(tmp_path / name, broken=bad)
        arguments = [sys.executable, "-c", MEASURE, str(tmp_path / name), str(tmp_path / f"cache of {name}")]
        output = subprocess.run(arguments, check=True, capture_output=True, text=True)
        assert not output.stderr
        count, peak[name] = map(int, output.stdout.split())
        assert count == (50 if bad else 0)
    assert peak["broken"] < 1.5 * peak["clean"]


def test_a_header_may_claim_anything_up_to_the_cap(tmp_path: Path) -> None:
    """The largest picture allowed is read; one row more is refused before anything is decoded."""
    largest = png(10_000, 5_000, 1, 0, bytes(1_251 * 5_000))
    assert not decode_picture(written(tmp_path / "a.png", largest), 8, 1).any()
    with pytest.raises(PictureError, match="million pixels"):
        decode_picture(written(tmp_path / "b.png", png(10_000, 5_001, 1, 0, b"")), 8, 1)
