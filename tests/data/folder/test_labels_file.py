"""Changing lines of a labels.csv."""

from __future__ import annotations

import os
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crmatch.data.folder.labels_file import change_labels, read_labels
from crmatch.errors import DataError


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        (None, {"a.jpg": "cat"}, "path,label\na.jpg,cat\n"),
        ("path,label\na.jpg,cat\nb.jpg,dog\n", {"a.jpg": None}, "path,label\nb.jpg,dog\n"),
        ("path,label\na.jpg,cat\n", {"a.jpg": "-", "c.jpg": ""}, "path,label\na.jpg,-\nc.jpg,\n"),
        # Other columns, their order and the delimiter stay; a path may be written in other ways.
        ("why;Label;path\nwell, so;cat;.\\x\\a.jpg\n", {"x/a.jpg": "dog"}, "why;Label;path\nwell, so;dog;.\\x\\a.jpg\n"),
        ("\ufeffpath,label,why\r\na.jpg\r\n", {"b,\n.jpg": 'a "cat"'}, 'path,label,why\na.jpg,,\n"b,\n.jpg","a ""cat""",\n'),
        ("path,label\na.jpg,cat\n./a.jpg,cat\n", {"a.jpg": "dog"}, "path,label\na.jpg,dog\n"),
    ],
)
def test_only_the_lines_of_the_pictures_change(
    tmp_path: Path, before: str | None, changes: dict[str, str | None], after: str
) -> None:
    file = tmp_path / "labels.csv"
    if before is not None:
        file.write_bytes(before.encode())
    change_labels(file, tmp_path, changes)
    assert file.read_bytes().decode() == after
    assert os.listdir(tmp_path) == ["labels.csv"]


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r/\\"), min_size=1), st.text("ab-"))
)
def test_what_was_written_is_read_again(changes: dict[str, str]) -> None:
    changes = {
        unicodedata.normalize("NFC", f"x/{path}/.jpg"): label for path, label in changes.items() if path not in (".", "..")
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "labels.csv"
        for path, label in changes.items():
            change_labels(file, Path(folder), {path: label})
        assert read_labels(file, Path(folder), changes) == changes


def test_a_damaged_file_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("name,class\n")
    with pytest.raises(DataError, match="no header path,label"):
        change_labels(file, tmp_path, {"a.jpg": "cat"})
    assert file.read_text() == "name,class\n"
    with pytest.raises(DataError, match="line break in its name"):
        change_labels(tmp_path / "other.csv", tmp_path, {"a\rb.jpg": "cat"})
