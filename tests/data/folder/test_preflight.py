from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from picture_corpus import draw, encoded, picture, seed_of, write_corpus

from crmatch.data.folder.decode import EXTENSIONS
from crmatch.data.folder.preflight import ClassCount, Preflight, check_folder
from crmatch.data.folder.scan import find_pictures, scan_folder
from crmatch.errors import DataError

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    draw(root, *(f"labeled/{name}/{row}.png" for name in ("cat", "dog") for row in range(3)))
    draw(root, *(f"unlabeled/{row}.png" for row in range(5)), "test/cat/0.png", "test/dog/0.png")
    return root


def look(folder: Path, image_size: int | None = None) -> Preflight:
    found = check_folder(folder, image_size, folder.parent / "data")
    json.dumps(asdict(found))
    return found


def warned(folder: Path, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in look(folder).warnings)


def test_a_good_folder_has_no_warnings(folder: Path) -> None:
    found = look(folder)
    assert found.classes == (ClassCount("cat", 3, 1), ClassCount("dog", 3, 1))
    assert (found.unlabeled, found.test, found.channels, found.image_size) == (5, 2, 3, 16)
    assert found.warnings == ()
    assert found.lines() == [
        f"{folder}: 6 labeled pictures of 2 classes, 5 unlabeled, 2 for testing; color",
        "  cat: 3 labeled, 1 for testing",
        "  dog: 3 labeled, 1 for testing",
        "pictures are used as they are (16x16)",
    ]


def test_copies_across_parts_are_found_whatever_their_format(folder: Path) -> None:
    shutil.copy(folder / "labeled/cat/0.png", folder / "unlabeled/copy.png")
    bitmap = encoded(picture(seed_of("unlabeled/1.png"), "RGB", 16, 16), "BMP")
    (folder / "test/cat/again.bmp").write_bytes(bitmap)
    shutil.copy(folder / "labeled/dog/0.png", folder / "labeled/cat/dog.png")
    shutil.copy(folder / "unlabeled/2.png", folder / "unlabeled/2 copy.png")
    found = look(folder)
    assert {item.paths: item.roles for item in found.duplicates} == {
        ("labeled/cat/0.png", "unlabeled/copy.png"): ("labeled", "unlabeled"),
        ("unlabeled/1.png", "test/cat/again.bmp"): ("unlabeled", "test"),
        ("labeled/cat/dog.png", "labeled/dog/0.png"): ("labeled", "labeled"),
    }
    assert found.copies == 1
    assert [warning.partition(":")[0] for warning in found.warnings] == [
        "1 picture in test/ also in the training set",
        "1 picture with contradicting labels",
        "1 picture both labeled and unlabeled",
        "1 picture repeated within the same role and class",
    ]
    assert "  unlabeled/1.png = test/cat/again.bmp" in found.lines()


def test_few_and_uneven_labels_are_said(folder: Path) -> None:
    draw(folder, "labeled/horse/1.png", *(f"labeled/cat/{row}.png" for row in range(3, 12)))
    assert warned(folder, "only one label for horse")
    assert warned(folder, "uneven labels: 12 for cat, 1 for horse")
    assert warned(folder, "no test pictures of horse")


def test_missing_parts_are_said(folder: Path) -> None:
    shutil.rmtree(folder / "unlabeled")
    shutil.rmtree(folder / "test")
    assert warned(folder, "no unlabeled pictures")
    assert warned(folder, "no test/<class>/ folder")
    (folder / "labeled/cat/IMG.HEIC").write_text("nothing")
    (folder / "labeled/cat/notes.txt").write_text("nothing")
    assert warned(folder, "files of other kinds are ignored: 1 .txt")
    if ".heic" not in EXTENSIONS:
        assert warned(folder, "1 picture of an iPhone (.heic) cannot be read: pip install 'crmatch[heic]'")


@pytest.mark.skipif(".heic" in EXTENSIONS, reason="the extra heic is installed")
@pytest.mark.parametrize("place", ["labeled/cat/1.HEIC", "cat/1.heic", "1.heic"])
def test_a_folder_of_nothing_but_iphone_pictures_names_what_reads_them(place: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("nothing")
    for find in (lambda: scan_folder(tmp_path, trainable=False), lambda: find_pictures(tmp_path)):
        with pytest.raises(DataError, match=r"1 \.heic.*\n.*crmatch\[heic\]"):
            find()


def test_names_that_differ_in_case_only_are_said(folder: Path) -> None:
    draw(folder, "labeled/Dog/1.png", "labeled/Dog/2.png")
    assert warned(folder, "differ only in case: Dog, dog")


def test_a_class_without_readable_labels_is_said(folder: Path) -> None:
    for row in range(3):
        (folder / f"labeled/dog/{row}.png").write_text("dog")
    assert warned(folder, "no labeled picture of dog can be read")


@pytest.mark.parametrize(
    ("size", "image_size", "words"),
    [
        ((48, 64), None, "center-cropped from 48x64 to 48x48"),
        ((96, 64), 32, "resized and center-cropped from 96x64 to 32x32"),
        ((28, 28), 32, "resized from 28x28 to 32x32"),
    ],
)
def test_what_will_be_done_is_said(tmp_path: Path, size: tuple[int, int], image_size: int | None, words: str) -> None:
    draw(tmp_path / "p", "labeled/a/1.png", "labeled/b/1.png", "unlabeled/1.png", size=size)
    assert look(tmp_path / "p", image_size).treatment == f"pictures are {words}"


def test_mixed_sizes_are_said(tmp_path: Path) -> None:
    draw(tmp_path / "p", "labeled/a/1.png", size=(20, 31))
    draw(tmp_path / "p", "labeled/b/1.png", "labeled/b/2.png", size=(64, 64))
    draw(tmp_path / "p", "unlabeled/1.png", size=(300, 100))
    found = look(tmp_path / "p")
    assert found.treatment == "pictures are resized and center-cropped from 3 different sizes (20x31 to 300x100) to 64x64"
    assert found.sizes[0] == (64, 64, 2)
    assert warned(tmp_path / "p", "1 picture enlarged more than twofold")
    assert warned(tmp_path / "p", "1 picture with more than half lost to the center crop")


def test_all_fifty_broken_pictures_are_in_the_report(tmp_path: Path) -> None:
    broken = write_corpus(tmp_path / "p", 100)
    assert len(broken) == 50
    found = look(tmp_path / "p")
    assert {named.path for named in found.unreadable} == broken
    assert {item["path"] for item in asdict(found)["unreadable"]} == broken
    text = "\n".join(found.lines())
    assert all(f"  {path}: " in text for path in broken)
    assert "cannot be read: 50" in found.lines()
    assert "  and 47 more" in found.lines(3)


def test_strange_names_stay_on_their_line(folder: Path) -> None:
    draw(folder, "labeled/two\nlines\x1b[31m/1.png", "labeled/<script>/1.png")
    (folder / "unlabeled/bad\nname.png").write_text("nothing")
    lines = look(folder).lines()
    assert "  two\\nlines\\x1b[31m: 1 labeled, 0 for testing" in lines
    assert "  <script>: 1 labeled, 0 for testing" in lines
    assert all(line.isprintable() for line in lines)
