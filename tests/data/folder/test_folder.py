"""Folders of pictures: scanning, labels files, loading as image sets, and the cache of decoded pixels."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_corpus import draw, encoded, picture, pixels, seed_of
from PIL import Image

from crmatch.data.folder import cache as pixel_cache
from crmatch.data.folder.cache import decode_folder
from crmatch.data.folder.load import FolderData, load_folder
from crmatch.data.folder.scan import scan_folder
from crmatch.data.load import load_data
from crmatch.data.splits import given_split, make_split
from crmatch.errors import CRMatchError, DataError, RequestError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, three unlabeled pictures, two for testing."""
    root = tmp_path / "photos"
    draw(root, "labeled/dog/b.png", "labeled/dog/a.png", "labeled/cat/1.png")
    draw(root, "unlabeled/z.png", "unlabeled/deep/er/y.png", "unlabeled/x.png", "test/cat/t.png", "test/dog/t.png")
    return root


def message(folder: Path, labels_file: Path | None = None, kind: type[CRMatchError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        scan_folder(folder, labels_file)
    text = str(caught.value)
    assert text.count("\n") == 1, "what was found, then what would work"
    return text


def load(folder: Path, image_size: int | None = None, labels_file: Path | None = None) -> FolderData:
    return load_folder(folder, image_size, folder.parent / "data", labels_file)


def same_pixels(image: torch.Tensor, seed: int) -> bool:
    return bool((image.permute(1, 2, 0).numpy() == pixels(seed, 16, 16)).all())


def test_pictures_are_found_by_class_and_path(folder: Path) -> None:
    index = scan_folder(folder)
    assert index.class_names == ("cat", "dog")
    assert index.paths == (
        "labeled/cat/1.png", "labeled/dog/a.png", "labeled/dog/b.png",
        "unlabeled/deep/er/y.png", "unlabeled/x.png", "unlabeled/z.png",
        "test/cat/t.png", "test/dog/t.png",
    )  # fmt: skip
    assert index.labels.tolist() == [0, 1, 1, -1, -1, -1, 0, 1]
    assert index.roles.tolist() == ["labeled"] * 3 + ["unlabeled"] * 3 + ["test"] * 2
    assert index.training == 6
    assert not index.skipped


def test_classes_are_ordered_by_name_before_paths(folder: Path) -> None:
    """A space sorts before a slash: the order of whole paths is not that of classes."""
    draw(folder, "labeled/cat big/1.png", "labeled/cat/z/1.png")
    index = scan_folder(folder)
    assert index.class_names == ("cat", "cat big", "dog")
    assert index.labels[:5].tolist() == [0, 0, 1, 2, 2]


def test_names_may_be_anything(folder: Path) -> None:
    strange = ["<script>alert(1)</script>".replace("/", "-"), "Käse mit Löchern", "猫", "new\nline", "[bold]"]
    draw(folder, *(f"labeled/{name}/ein Bild 🐈.png" for name in strange), "unlabeled/a b/ü\n.PNG")
    data = load(folder)
    assert data.train.class_names == tuple(sorted([*strange, "cat", "dog"]))
    assert not data.decoded.broken


def test_extensions_in_any_case_are_found_and_hidden_files_are_not(folder: Path) -> None:
    draw(folder, "unlabeled/A.PNG", "unlabeled/B.JpEg", "unlabeled/.hidden.png", "unlabeled/.cache/c.png")
    (folder / "unlabeled" / "notes.txt").write_text("nothing")
    (folder / "unlabeled" / "IMG_1.HEIC").write_text("nothing")
    index = scan_folder(folder)
    assert [path for path in index.paths if path.startswith("unlabeled/")] == [
        "unlabeled/A.PNG", "unlabeled/B.JpEg", "unlabeled/deep/er/y.png", "unlabeled/x.png", "unlabeled/z.png",
    ]  # fmt: skip
    assert index.ignored == {".txt": 1, ".heic": 1}


def test_pictures_outside_the_layout_are_named(folder: Path) -> None:
    draw(folder, "labeled/loose.png", "test/loose.png", "train/cat/1.png")
    assert {named.path: named.reason for named in scan_folder(folder).skipped} == {
        "labeled/loose.png": "not in a class directory",
        "test/loose.png": "not in a class directory",
        "train": "neither labeled/, unlabeled/ nor test/",
    }


def test_links_are_followed_but_never_in_circles(folder: Path, tmp_path: Path) -> None:
    draw(tmp_path / "elsewhere", "one.png", "sub/two.png")
    unlabeled = folder / "unlabeled"
    (unlabeled / "loop").symlink_to(unlabeled, target_is_directory=True)
    (unlabeled / "deep" / "up").symlink_to(folder, target_is_directory=True)
    (unlabeled / "self.png").symlink_to("self.png")
    (unlabeled / "gone.png").symlink_to("nowhere.png")
    (unlabeled / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (unlabeled / "link again").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (unlabeled / "linked.png").symlink_to(tmp_path / "elsewhere" / "one.png")
    os.mkfifo(unlabeled / "pipe.png")
    index = scan_folder(folder)
    paths = [path for path in index.paths if "elsewhere" in os.path.realpath(folder / path)]
    assert paths == ["unlabeled/link/one.png", "unlabeled/link/sub/two.png", "unlabeled/linked.png"]
    assert {named.path.removeprefix("unlabeled/"): named.reason for named in index.skipped} == {
        "loop": "a circular link",
        "deep/up": "a circular link",
        "self.png": "a broken link",
        "gone.png": "a broken link",
        "link again": "a second link to the same directory",
        "pipe.png": "not a regular file",
    }


def test_many_links_between_directories_stay_finite(folder: Path) -> None:
    """Every directory links to every other: without a limit, exponentially many paths."""
    places = [folder / "unlabeled" / f"d{number}" for number in range(12)]
    for place in places:
        draw(place, "a.png")
    for place in places:
        for other in places:
            (place / f"to {other.name}").symlink_to(other, target_is_directory=True)
    assert 12 <= len([path for path in scan_folder(folder).paths if path.endswith("a.png")]) < 200


def test_names_that_are_not_utf8_are_skipped_and_shown(folder: Path) -> None:
    shutil.copy(folder / "unlabeled/x.png", os.fsencode(folder / "unlabeled") + b"/\xff\xfe.png")
    (named,) = scan_folder(folder).skipped
    assert named.path == "unlabeled/\\udcff\\udcfe.png"
    assert "UTF-8" in named.reason


def test_directories_that_cannot_be_read_are_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("unlabeled/deep"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    index = scan_folder(folder)
    assert [(named.path, named.reason) for named in index.skipped] == [("unlabeled/deep", "permission denied")]
    assert index.training == 5


def test_wrong_folders_are_answered_in_two_lines(tmp_path: Path, folder: Path) -> None:
    assert "no folder" in message(tmp_path / "nowhere", kind=RequestError)
    draw(tmp_path / "classes", "cat/1.png", "dog/1.png")
    assert "directories found: cat, dog" in message(tmp_path / "classes")
    (tmp_path / "empty" / "labeled").mkdir(parents=True)
    assert "no labeled pictures" in message(tmp_path / "empty")
    draw(tmp_path / "single", "labeled/cat/1.png", "unlabeled/1.png")
    assert "only one class: cat" in message(tmp_path / "single")
    (folder / "labeled" / "horse").mkdir()
    assert "no pictures of horse" in message(folder)
    (folder / "labeled" / "horse").rmdir()
    draw(folder, "test/horse/1.png")
    text = message(folder)
    assert "classes without labeled pictures: horse" in text
    assert "cat, dog" in text


def test_wrong_label_files_are_answered_in_two_lines(folder: Path, tmp_path: Path) -> None:
    def answer(content: str | bytes) -> str:
        file = tmp_path / "given.csv"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return message(folder, file)

    assert "no labels file" in message(folder, tmp_path / "nowhere.csv", RequestError)
    assert "no header path,label (first line: empty)" in answer("")
    assert "no header path,label" in answer("unlabeled/x.png,cat\n")
    assert "unlabeled/nowhere.png" in answer("path,label\nunlabeled/nowhere.png,cat\n")
    assert "not in" in answer("path,label\n../../etc/passwd.png,cat\n")
    assert "twice: 'cat' and 'dog'" in answer("path,label\nunlabeled/x.png,cat\n./unlabeled/x.png,dog\n")
    assert "test picture of 'cat'" in answer("path,label\ntest/cat/t.png,dog\n")
    assert "cannot be read" in answer(b"path,label\n\xff\xfe,cat\n")
    assert "cannot be read" in answer('path,label\n"' + "x" * 200_000 + '",cat\n')


def test_a_labels_file_adds_to_the_directories_and_overrides_them(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "given.csv"
    file.write_text(
        "path,label\nunlabeled/x.png,bird\nunlabeled/z.png,\nlabeled/dog/a.png,cat\nlabeled/dog/b.png,\ntest/cat/t.png,cat\n"
    )
    before, after = scan_folder(folder), scan_folder(folder, file)
    assert after.class_names == ("bird", "cat", "dog")
    assert after.paths == before.paths, "labels move no picture"
    assert after.labels.tolist() == [1, 1, 2, -1, 0, -1, 1, 2]


@pytest.mark.parametrize("style", ["plain", "excel", "windows", "absolute", "mac"])
def test_one_folder_with_labels_csv(tmp_path: Path, style: str) -> None:
    names = ["b/é.png", "a.png", "c d.png", "b/f.png"]
    draw(tmp_path / "p", *names, "test/cat/1.png")
    lines = [("path", "label"), (names[0], "dog"), (names[1], "cat"), (names[2], "")]
    separator, encoding = ",", "utf-8"
    if style == "excel":
        separator, encoding = ";", "utf-8-sig"
    elif style == "windows":
        lines = [(path.replace("/", "\\"), label) for path, label in lines]
    elif style == "absolute":
        lines = [lines[0], *((str(tmp_path / "p" / path), label) for path, label in lines[1:])]
    elif style == "mac":
        lines = [(unicodedata.normalize("NFD", path), label) for path, label in lines]
    text = "".join(separator.join(line) + "\r\n" for line in lines)
    (tmp_path / "p" / "labels.csv").write_text(text, encoding=encoding, newline="")
    index = scan_folder(tmp_path / "p")
    assert index.paths == ("a.png", "b/f.png", "b/é.png", "c d.png", "test/cat/1.png")
    assert index.labels.tolist() == [0, -1, 1, -1, 0]


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


@pytest.mark.parametrize("layout", ["directories", "labels.csv"])
def test_exported_digits_are_the_packed_ones_to_the_pixel(tmp_path: Path, layout: str) -> None:
    root, packed = tmp_path / "digits", load_data("digits")
    train, test = packed.train, packed.test
    assert test is not None
    split = make_split(packed, 4, 1, "balanced", "remaining")
    labeled = set(split.labeled.tolist())

    def save(image: torch.Tensor, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)

    lines = ["path,label"]
    for row, (image, label) in enumerate(zip(train.images, train.labels.tolist(), strict=True)):
        place = f"labeled/{label}" if row in labeled else "unlabeled"
        save(image, root / (f"{place}/{row:05}.png" if layout == "directories" else f"{row:05}.png"))
        lines.append(f"{row:05}.png,{label if row in labeled else ''}")
    for row, (image, label) in enumerate(zip(test.images, test.labels.tolist(), strict=True)):
        save(image, root / f"test/{label}/{row:05}.png")
    if layout == "labels.csv":
        (root / "labels.csv").write_text("\n".join(lines) + "\n")
    data = load(root)
    found = given_split(data.train.labels, "remaining")
    assert data.train.class_names == train.class_names
    assert torch.equal(data.train.images[found.labeled], train.images[split.labeled])
    assert torch.equal(data.train.labels[found.labeled], train.labels[split.labeled])
    assert torch.equal(data.train.images[found.unlabeled], train.images[split.unlabeled])
    assert data.test is not None
    order = torch.argsort(test.labels, stable=True)
    assert torch.equal(data.test.images, test.images[order])
    assert torch.equal(data.test.labels, test.labels[order])


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
    second, decoded = decodings.count(folder)
    assert not decoded
    assert first.decoded.broken == second.decoded.broken
    assert torch.equal(first.train.images, second.train.images)
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


def test_one_color_picture_among_gray_ones_makes_three_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crmatch.data.folder.decode.HEADERS", 3)
    draw(tmp_path / "p", *(f"labeled/{name}/{row}.png" for name in "ab" for row in range(10)), mode="L")
    draw(tmp_path / "p", "unlabeled/1.png")
    images = load(tmp_path / "p").train.images
    assert images.shape[1] == 3
    assert (images[:20, 0] == images[:20, 1]).all()
    assert (images[20, 0] != images[20, 1]).any()


def test_a_broken_color_picture_does_not_make_gray_ones_color(tmp_path: Path) -> None:
    draw(tmp_path / "p", "labeled/a/1.png", "labeled/b/1.png", mode="L")
    content = encoded(picture(1, "RGB", 64, 64), "JPEG")
    (tmp_path / "p/labeled/a/2.jpg").write_bytes(content[: len(content) // 2])
    data = load(tmp_path / "p")
    assert [*data.decoded.broken.values()] == ["truncated"]
    assert data.train.images.shape[1] == 1


def test_writing_into_the_pixels_changes_nothing_on_disk(folder: Path) -> None:
    first = load(folder)
    kept = first.train.images.clone()
    first.train.images.zero_()
    assert torch.equal(load(folder).train.images, kept)


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
        monkeypatch.setattr(pixel_cache, "DECODER", 2)
    data, decoded = decodings.count(folder)
    assert len(decoded) == 8
    assert torch.equal(data.train.images, kept)


LOAD = """
import sys
from pathlib import Path
from crmatch.data.folder.cache import decode_folder
from crmatch.data.folder.scan import scan_folder
decode_folder(scan_folder(Path(sys.argv[1])), 64, Path(sys.argv[2]), lambda done, total: print(done, flush=True))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", LOAD, str(folder), str(folder.parent / "data")]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.process
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


@pytest.mark.process
def test_two_at_once_decode_only_once(tmp_path: Path) -> None:
    draw(tmp_path / "p", *(f"labeled/{name}/{row:03}.png" for name in "ab" for row in range(100)))
    outputs = []
    for process in [start(tmp_path / "p") for _ in range(2)]:
        outputs.append(process.communicate()[0])
        assert process.returncode == 0
    assert sorted(output.split()[-1:] for output in outputs) == [[], ["200"]]


def test_scanning_is_fast(tmp_path: Path) -> None:
    """60,000 pictures within 2 s means 30 us each; the limit is generous because tests share their machine."""
    (tmp_path / "p" / "unlabeled").mkdir(parents=True)
    for row in range(3_000):
        (tmp_path / "p" / "unlabeled" / f"{row:05}.png").touch()
    draw(tmp_path / "p", "labeled/a/1.png", "labeled/b/1.png")
    begin = time.process_time()
    scan_folder(tmp_path / "p")
    assert time.process_time() - begin < 0.3
