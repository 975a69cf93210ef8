"""Labels from exports of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from picture_corpus import draw

from conftest import Command
from crmatch.data.folder.importers import read_export
from crmatch.data.folder.scan import scan_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw(tmp_path / "photos", "a/1.png", "b/1.png", "b/two words.png", "3.png", "4.png")
    return tmp_path / "photos"


def task(image: str, *choices: str) -> dict[str, object]:
    result = [{"type": "choices", "value": {"choices": list(choices)}}]
    return {"id": 1, "data": {"image": image}, "annotations": [{"was_cancelled": False, "result": result}]}


LABEL_STUDIO = [
    task("/data/upload/7/0a1b2c3d-3.png", "cat"),
    task("/data/local-files/?d=photos/b/two%20words.png", "dog"),
    task("s3://bucket/photos/a/1.png", "cat"),
    task("/data/upload/7/0a1b2c3e-1.png", "dog"),  # there are two
    task("/data/upload/7/0a1b2c3f-4.png", "cat", "dog"),
]
MINIMAL = [
    {"image": f"/data/upload/7/0a1b2c3d-{name}", "choice": label}
    for name, label in (("3.png", "cat"), ("two%20words.png", "dog"), ("1.png", "dog"))
] + [{"image": "photos/a/1.png", "choice": "cat"}]
CVAT = """<?xml version="1.0" encoding="utf-8"?><annotations><version>1.1</version>
<image id="0" name="photos/3.png" width="16" height="16"><tag label="cat" source="manual"></tag></image>
<image id="1" name="b/two words.png" width="16" height="16"><tag label="dog" source="manual"></tag></image>
<image id="2" name="a/1.png" width="16" height="16"><tag label="cat"></tag><box label="ear"></box></image>
<image id="3" name="4.png" width="16" height="16"></image><image id="4" name="9.png"><tag label="cat"></tag></image>
</annotations>"""
EXPORTS = {
    "tasks.json": json.dumps(LABEL_STUDIO),
    "minimal.json": json.dumps(MINIMAL),
    "table.csv": "id,image,choice\n" + "".join(f"1,{row['image']},{row['choice']}\n" for row in MINIMAL),
    "annotations.xml": CVAT,
    "metadata.csv": "file_name,label\nb/two words.png,dog\n3.png,cat\na/1.png,cat\n",
}


@pytest.mark.parametrize("name", list(EXPORTS))
def test_labels_are_found_by_the_end_of_the_path(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(EXPORTS[name])
    found = read_export(tmp_path / name, folder)
    assert found.labels == {"3.png": "cat", "b/two words.png": "dog", "a/1.png": "cat"}
    if name == "tasks.json":
        assert [Path(path).name for path in (*found.missing, *found.unclear)] == ["0a1b2c3e-1.png", "0a1b2c3f-4.png"]
    if name == "annotations.xml":
        assert (found.missing, found.unclear) == (["9.png"], ["4.png"])


def test_the_command_writes_labels_that_a_folder_is_trained_with(crmatch: Command, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "export.xml").write_text(CVAT)
    outcome = crmatch("data", "import", tmp_path / "export.xml", folder)
    assert outcome.code == 0, outcome.err
    assert "3 labels of 2 classes" in outcome.out
    assert "1 left out, not found in the folder: 9.png" in outcome.err
    assert scan_folder(folder).class_names == ("cat", "dog")
    (folder / "labels.csv").write_text("path,label\n4.png,bird\n3.png,bird\n")
    assert crmatch("data", "import", tmp_path / "export.xml", folder).code == 0
    assert (folder / "labels.csv").read_text().splitlines()[1:3] == ["4.png,bird", "3.png,cat"]


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 1}', "<a", "id,name\n1,2\n"])
def test_files_that_are_no_exports_are_answered_in_two_lines(
    crmatch: Command, folder: Path, tmp_path: Path, content: str
) -> None:
    for ending in ("json", "xml", "csv"):
        (tmp_path / f"x.{ending}").write_text(content)
        outcome = crmatch("data", "import", tmp_path / f"x.{ending}", folder)
        assert outcome.code == 3
        assert len(outcome.err.splitlines()) == 2
