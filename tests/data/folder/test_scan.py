"""Scanning: which pictures a folder has, and which labels they get from directories and labels files."""

from __future__ import annotations

import errno
import os
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from picture_corpus import draw, draw_photos

from crmatch.data.folder.hold_out import hold_out
from crmatch.data.folder.scan import _Walk, scan_folder
from crmatch.errors import CRMatchError, DataError, RequestError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return draw_photos(tmp_path / "photos")


def message(folder: Path, labels_file: Path | None = None, kind: type[CRMatchError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        scan_folder(folder, labels_file)
    text = str(caught.value)
    assert text.count("\n") == 1, "what was found, then what would work"
    return text


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


def test_extensions_in_any_case_are_found_and_hidden_files_are_not(folder: Path) -> None:
    draw(folder, "unlabeled/A.PNG", "unlabeled/B.JpEg", "unlabeled/.hidden.png", "unlabeled/.cache/c.png")
    (folder / "unlabeled" / "notes.txt").write_text("nothing")
    (folder / "unlabeled" / "IMG_1.MP4").write_text("nothing")
    index = scan_folder(folder)
    assert [path for path in index.paths if path.startswith("unlabeled/")] == [
        "unlabeled/A.PNG", "unlabeled/B.JpEg", "unlabeled/deep/er/y.png", "unlabeled/x.png", "unlabeled/z.png",
    ]  # fmt: skip
    assert index.ignored == {".txt": 1, ".mp4": 1}


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


def test_a_directory_that_is_removed_during_the_scan_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "unlabeled" / "gone").mkdir()
    visit = _Walk._visit

    def visit_and_remove(walk: _Walk, entry: os.DirEntry[str], relative: str) -> bool:
        is_directory = visit(walk, entry, relative)
        if entry.name == "gone":
            os.rmdir(entry.path)
        return is_directory

    monkeypatch.setattr(_Walk, "_visit", visit_and_remove)
    assert [(named.path, named.reason) for named in scan_folder(folder).skipped] == [
        ("unlabeled/gone", "no such file or directory")
    ]


def test_wrong_folders_are_answered_in_two_lines(tmp_path: Path, folder: Path) -> None:
    assert "no folder" in message(tmp_path / "nowhere", kind=RequestError)
    assert "no folder" in message(tmp_path / ("9" * 300), kind=RequestError)
    assert "belongs to the system" in message(Path("/proc"), kind=RequestError)
    draw(tmp_path / "classes", "cat/1.png", "unlabeled/1.png")
    assert "directories found: cat, unlabeled" in message(tmp_path / "classes")
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


def test_class_directories_may_be_at_the_top(tmp_path: Path) -> None:
    draw(tmp_path, "dog/a.png", "cat/deep/1.png", "cat/2.png", "unlabeled/x.png", "val/cat/t.png", "loose.png")
    (tmp_path / "notes").mkdir()
    index = scan_folder(tmp_path)
    assert index.class_names == ("cat", "dog")
    assert index.paths == ("cat/2.png", "cat/deep/1.png", "dog/a.png", "unlabeled/x.png", "val/cat/t.png")
    assert index.labels.tolist() == [0, 0, 1, -1, 0]
    assert index.training == 4
    (tmp_path / "labels.csv").write_text("path,label\nunlabeled/x.png,cat\n")  # as a labeling round writes it
    assert scan_folder(tmp_path).labels.tolist() == [0, 0, 1, 0, 0]


def test_the_layout_of_competitions_has_train_and_a_test_folder_without_classes(tmp_path: Path) -> None:
    draw(tmp_path, "train/cat/1.png", "train/dog/1.png", "test/1.png", "test/2.png", "other/1.png")
    index = scan_folder(tmp_path)
    assert index.paths == ("train/cat/1.png", "train/dog/1.png", "test/1.png", "test/2.png")
    assert index.labels.tolist() == [0, 1, -1, -1]
    assert index.training == 4
    draw(tmp_path, "test/cat/3.png", "val/cat/4.png")
    index = scan_folder(tmp_path)
    assert index.roles.tolist() == ["labeled", "labeled", "test"]
    assert [named.path for named in index.skipped] == ["other", "test/1.png", "test/2.png", "val"]


@pytest.mark.parametrize("place", ["", "train/"])
def test_image_folders_of_hugging_face_are_read_by_their_metadata(tmp_path: Path, place: str) -> None:
    draw(tmp_path, "train/1.png", "train/2.png", "train/3.png", "test/1.png", "test/2.png")
    lines = [f"{'train/' if not place else ''}{name}.png,{label}" for name, label in (("1", "cat"), ("2", "dog"))]
    tests = ["test/1.png,dog"] if not place else []
    (tmp_path / f"{place}metadata.csv").write_text("\n".join(["file_name,label", *lines, *tests]))
    if place:
        (tmp_path / "test/metadata.csv").write_text("file_name,label,text\n1.png,dog,what a dog\n")
    index = scan_folder(tmp_path)
    assert index.paths == ("train/1.png", "train/2.png", "train/3.png", "test/1.png")
    assert index.labels.tolist() == [0, 1, -1, 1]
    assert index.training == 3


def test_a_part_of_the_labels_is_held_out_once_and_stays_the_test_set(tmp_path: Path) -> None:
    draw(tmp_path, *(f"{name}/{number}.png" for name in ("cat", "dog") for number in range(25)))
    assert hold_out(tmp_path) == 10
    index = scan_folder(tmp_path)
    assert index.labels[index.training :].tolist() == [0] * 5 + [1] * 5
    assert index.training == 40
    draw(tmp_path, *(f"cat/new {number}.png" for number in range(25)))
    assert hold_out(tmp_path) == 0
    assert scan_folder(tmp_path).paths[-10:] == index.paths[-10:]
    (tmp_path / "held-out.csv").write_text("path,label\n")  # the user wants all labels for training
    assert hold_out(tmp_path) == 0
    assert scan_folder(tmp_path).training == 75


def test_few_labels_are_all_needed_for_training(tmp_path: Path, folder: Path) -> None:
    draw(tmp_path / "few", *(f"{name}/{number}.png" for name in ("cat", "dog") for number in range(19)))
    assert hold_out(tmp_path / "few") == hold_out(folder) == 0
    assert not (tmp_path / "few" / "held-out.csv").exists()
