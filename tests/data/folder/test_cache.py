"""Folders as image sets, and the cache of decoded pixels. Pictures are decoded by worker processes."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_corpus import draw, draw_photos, encoded, picture, pixels, seed_of

from crmatch.data.folder import cache as pixel_cache
from crmatch.data.folder.cache import decode_folder, remove_unused
from crmatch.data.folder.load import FolderData, load_folder
from crmatch.data.folder.scan import scan_folder
from crmatch.errors import DataError, RequestError

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return draw_photos(tmp_path / "photos")


def load(folder: Path, image_size: int | None = None, labels_file: Path | None = None) -> FolderData:
    return load_folder(folder, image_size, folder.parent / "data", labels_file)


def same_pixels(image: torch.Tensor, seed: int) -> bool:
    return bool((image.permute(1, 2, 0).numpy() == pixels(seed, 16, 16)).all())


def test_names_may_be_anything(folder: Path) -> None:
    strange = ["<script>alert(1)</script>".replace("/", "-"), "Käse mit Löchern", "猫", "new\nline", "[bold]"]
    draw(folder, *(f"labeled/{name}/ein Bild 🐈.png" for name in strange), "unlabeled/a b/ü\n.PNG")
    data = load(folder)
    assert data.train.class_names == tuple(sorted([*strange, "cat", "dog"]))
    assert not data.decoded.broken


def test_rows_contain_their_pictures(folder: Path) -> None:
    data = load(folder)
    assert data.train.images.shape == (6, 3, 16, 16)
    assert data.train.labels.tolist() == [0, 1, 1, -1, -1, -1]
    assert data.test is not None
    assert data.test.labels.tolist() == [0, 1]
    for paths, images in ((data.train_paths, data.train.images), (data.test_paths, data.test.images)):
        assert all(same_pixels(image, seed_of(path)) for path, image in zip(paths, images, strict=True))


def test_size_and_channels_follow_the_pictures(tmp_path: Path) -> None:
    draw(tmp_path / "gray", "labeled/a/1.png", "labeled/b/1.png", mode="L", size=(28, 28))
    data = load(tmp_path / "gray")
    assert data.train.images.shape == (2, 1, 28, 28)
    assert data.test is None
    draw(tmp_path / "wide", *(f"labeled/{name}/1.png" for name in range(100)), "unlabeled/1.png", size=(96, 64))
    data = load(tmp_path / "wide")
    assert data.train.images.shape == (101, 3, 64, 64)
    assert data.train.class_names == tuple(sorted(map(str, range(100))))
    with pytest.raises(RequestError, match="too small"):
        load(tmp_path / "wide", 4)


def test_broken_pictures_are_left_out_and_named(folder: Path) -> None:
    (folder / "labeled/dog/a.png").write_bytes(b"")
    (folder / "unlabeled/x.png").write_text("cat")
    (folder / "test/cat/t.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    index, data = scan_folder(folder), load(folder)
    assert [index.paths[row] for row in data.decoded.broken] == ["labeled/dog/a.png", "unlabeled/x.png", "test/cat/t.png"]
    assert data.train_paths == ("labeled/cat/1.png", "labeled/dog/b.png", "unlabeled/deep/er/y.png", "unlabeled/z.png")
    assert data.test_paths == ("test/dog/t.png",)
    assert same_pixels(data.train.images[3], seed_of("unlabeled/z.png"))


def test_a_class_that_loses_all_its_labels_is_an_error(folder: Path) -> None:
    (folder / "labeled/cat/1.png").write_text("cat")
    with pytest.raises(DataError, match=r"none of the labeled pictures of cat can be read\.\n.*labeled/cat/1.png"):
        load(folder)
    for path in folder.rglob("*.png"):
        path.write_text("cat")
    with pytest.raises(DataError, match="none of the 8 pictures"):
        load(folder)


class Decodings:
    """Records the pictures that are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        real = pixel_cache.decode_rows

        def spy(jobs: Any, *rest: Any) -> Iterator[Any]:
            self.paths += [path for _, path in jobs]
            yield from real(jobs, *rest)

        monkeypatch.setattr(pixel_cache, "decode_rows", spy)

    def count(self, folder: Path, *arguments: Any) -> tuple[FolderData, list[str]]:
        self.paths.clear()
        return load(folder, *arguments), sorted(os.path.relpath(path, folder) for path in self.paths)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> Decodings:
    return Decodings(monkeypatch)


def slot_of(folder: Path) -> Path:
    """The cache's directory of a folder."""
    (slot,) = (folder.parent / "data" / "folders").iterdir()
    return slot


def test_a_second_start_decodes_nothing(folder: Path, decodings: Decodings) -> None:
    (folder / "unlabeled/broken.png").write_text("cat")
    first, decoded = decodings.count(folder)
    assert len(decoded) == 9
    kept = first.train.images.clone()
    first.train.images.zero_()  # changes nothing on disk
    second, decoded = decodings.count(folder)
    assert not decoded
    assert first.decoded.broken == second.decoded.broken
    assert torch.equal(second.train.images, kept)
    assert (first.decoded.facts == second.decoded.facts).all()
    _, decoded = decodings.count(folder, 20)
    assert len(decoded) == 9, "another size is another cache"


def test_new_labels_decode_nothing(folder: Path, tmp_path: Path, decodings: Decodings) -> None:
    decodings.count(folder)
    (tmp_path / "given.csv").write_text("path,label\nunlabeled/x.png,bird\n")
    data, decoded = decodings.count(folder, None, tmp_path / "given.csv")
    assert not decoded
    assert data.train.labels[data.train_paths.index("unlabeled/x.png")] == data.train.class_names.index("bird")


def test_only_changed_pictures_are_decoded_again(folder: Path, decodings: Decodings) -> None:
    (folder / "unlabeled/broken.png").write_text("cat")
    decodings.count(folder)
    before = (folder / "unlabeled/x.png").stat()
    draw(folder, "unlabeled/new.png")
    (folder / "unlabeled/z.png").rename(folder / "labeled/dog/z.png")
    content = bytearray(encoded(picture(99, "RGB", 16, 16), "BMP"))
    (folder / "unlabeled/x.png").write_bytes(content)
    data, decoded = decodings.count(folder)
    assert decoded == ["labeled/dog/z.png", "unlabeled/new.png", "unlabeled/x.png"]
    assert same_pixels(data.train.images[data.train_paths.index("unlabeled/x.png")], 99)
    content[60:70] = bytes(10)
    (folder / "unlabeled/x.png").write_bytes(content)
    os.utime(folder / "unlabeled/x.png", ns=(before.st_atime_ns, before.st_mtime_ns))
    _, decoded = decodings.count(folder)
    assert decoded == ["unlabeled/x.png"], "noticed although size and mtime are the old ones"
    assert same_pixels(data.train.images[data.train_paths.index("labeled/cat/1.png")], seed_of("labeled/cat/1.png"))
    assert len(list(slot_of(folder).glob("pixels*"))) == 1, "pixels of old pictures are removed"


def test_one_readable_color_picture_among_gray_ones_makes_three_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crmatch.data.folder.decode.HEADERS", 3)  # so that the guess by headers is wrong
    draw(tmp_path / "p", *(f"labeled/{name}/{row}.png" for name in "ab" for row in range(10)), mode="L")
    content = encoded(picture(1, "RGB", 64, 64), "JPEG")
    (tmp_path / "p/labeled/a/0.jpg").write_bytes(content[: len(content) // 2])
    data = load(tmp_path / "p")
    assert [*data.decoded.broken.values()] == ["truncated"]
    assert data.train.images.shape == (20, 1, 16, 16)
    draw(tmp_path / "p", "unlabeled/1.png")
    images = load(tmp_path / "p").train.images
    assert (images[:20] == data.train.images).all(), "gray pictures have three equal channels"
    assert (images[20, 0] != images[20, 1]).any()


def test_pixels_larger_than_the_memory_can_be_mapped(tmp_path: Path) -> None:
    side = 1024
    rows = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (3 * side * side)
    with open(tmp_path / "pixels", "wb") as file:
        try:
            file.truncate(rows * side * side * 3)
        except OSError:
            pytest.skip("this file system has no sparse files of that size")
    mapped = pixel_cache._map(tmp_path / "pixels", (rows, side, side, 3))
    images = torch.from_numpy(mapped).permute(0, 3, 1, 2)
    images[-1, :, 0, 0] = 7
    assert images[-1].sum() == 21


def test_a_full_disk_is_reported_before_the_work_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decodings: Decodings
) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(DataError, match="No space left on device") as caught:
            decodings.count(folder)
    assert str(caught.value).count("\n") == 1
    assert not decodings.paths
    assert not list((tmp_path / "data").rglob("pixels*"))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be kept"):
        load_folder(folder, None, tmp_path / "file")


@pytest.mark.parametrize("damage", ["index", "pixels", "no pixels", "old decoder"])
def test_a_damaged_cache_is_replaced(folder: Path, decodings: Decodings, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = load(folder).train.images.clone()
    (file,) = slot_of(folder).glob("pixels-*")
    if damage == "index":
        (slot_of(folder) / "index.json").write_text('{"key": 1')
    elif damage == "pixels":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "no pixels":
        file.unlink()
    else:
        monkeypatch.setattr(pixel_cache, "DECODER", 0)
    data, decoded = decodings.count(folder)
    assert len(decoded) == 8
    assert torch.equal(data.train.images, kept)


LOAD = """
import sys
from pathlib import Path
from crmatch.data.folder.cache import decode_folder, remove_unused
from crmatch.data.folder.scan import scan_folder
decode_folder(scan_folder(Path(sys.argv[1])), 64, Path(sys.argv[2]), lambda done, total: print(done, flush=True))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", LOAD, str(folder), str(folder.parent / "data")]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    draw(tmp_path / "p", *(f"labeled/{name}/{row:03}.png" for name in "ab" for row in range(100)))
    for kill_after in (1, 150):
        with start(tmp_path / "p") as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) >= kill_after:
                    process.send_signal(signal.SIGKILL)
                    break
        index, slot = scan_folder(tmp_path / "p"), slot_of(tmp_path / "p")
        if not (slot / "index.json").exists():
            assert not list(slot.glob("pixels-*"))
        decoded = decode_folder(index, 64, tmp_path / "data")
        assert not decoded.broken
        assert np.array_equal(decoded.pixels, decode_folder(index, 64, tmp_path / "other data").pixels)
        assert sorted(file.name.split("-")[0] for file in slot.iterdir() if file.name != "lock") == ["index.json", "pixels"]
        shutil.rmtree(tmp_path / "data")


def test_two_at_once_decode_only_once(tmp_path: Path) -> None:
    draw(tmp_path / "p", *(f"labeled/{name}/{row:03}.png" for name in "ab" for row in range(100)))
    outputs = []
    for process in [start(tmp_path / "p") for _ in range(2)]:
        outputs.append(process.communicate()[0])
        assert process.returncode == 0
    assert sorted(output.split()[-1:] for output in outputs) == [[], ["200"]]


def test_the_least_recently_used_directories_are_removed_first(tmp_path: Path) -> None:
    for age, name in enumerate(("used", "new", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pixels").write_bytes(bytes(1000 if age else 100))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    assert remove_unused(tmp_path, [tmp_path / "used"], most=1500) == 1000
    assert {path.name for path in tmp_path.iterdir()} == {"new", "used"}
    assert remove_unused(tmp_path, [tmp_path / "used"], most=0) == 1000
    assert {path.name for path in tmp_path.iterdir()} == {"used"}
