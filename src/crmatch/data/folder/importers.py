"""Labels from other programs: exports of Label Studio (JSON, CSV) and CVAT (XML), and tables such as metadata.csv."""

from __future__ import annotations

import csv
import io
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

from crmatch.atomic_files import MOST_TEXT, read_file
from crmatch.data.folder.scan import find_pictures
from crmatch.errors import DataError, RequestError

IMAGE_COLUMNS = ("image", "file_name", "filename", "path", "img", "picture")
LABEL_COLUMNS = ("choice", "label", "class")
MOST_XML = 24 << 20
"""Characters of the longest XML that is read, enough for a hundred thousand pictures; it takes thirty times as much memory."""


class Imported(NamedTuple):
    """What an export says about the pictures of a folder."""

    labels: dict[str, str]  # by path relative to the folder
    missing: list[str]  # pictures with a label that are not in the folder
    unclear: list[str]  # pictures with no label, or with several


def read_export(file: Path, folder: Path) -> Imported:
    """The labels of an export for the pictures below `folder`, matched by the longest unambiguous end of their paths."""
    try:
        text = read_file(file, MOST_TEXT).decode("utf-8-sig")
        entries = list(_entries(text, file.suffix.lower()))
        "".join(label for _, labels in entries for label in labels).encode()  # an error for what cannot be written
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {str(error.strerror).lower()}.\nName an exported file.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ElementTree.ParseError, csv.Error) as error:
        found = f"{file} is not an export that is known here: {str(error).splitlines()[0]}"
        raise DataError(f"{found}.\nExport JSON or CSV from Label Studio, or 'CVAT for images' from CVAT.") from error
    by_end = _ends([str(path.relative_to(folder)) for path in find_pictures(folder)])
    labels, missing, unclear = {}, [], []
    for picture, names in entries:
        place = _place(picture, by_end)
        if len(names) != 1:
            unclear.append(picture)
        elif place is None:
            missing.append(picture)
        else:
            (labels[place],) = names
    return Imported(labels, missing, unclear)


def _entries(text: str, ending: str) -> Iterator[tuple[str, set[str]]]:
    """The name of each picture, and its labels."""
    if ending == ".xml":  # CVAT for images 1.1
        if len(text) > MOST_XML:
            raise ValueError(f"it is longer than {MOST_XML >> 20} MB")
        if "<!DOCTYPE" in text:  # its entities can expand to gigabytes
            raise ValueError("it has a document type, which CVAT does not write")
        for image in ElementTree.fromstring(text).iter("image"):
            yield image.attrib["name"], {tag.attrib["label"] for tag in image.iter("tag")}
    elif ending == ".json":  # Label Studio: JSON, or JSON-MIN, which is a table
        for task in json.loads(text):
            yield _task(task) if "data" in task else _row(task)
    else:
        for row in csv.DictReader(io.StringIO(text)):
            yield _row(row)


def _task(task: dict[str, Any]) -> tuple[str, set[str]]:
    results = [part for one in task["annotations"] if not one.get("was_cancelled") for part in one["result"]]
    return _image(task["data"]), {choice for part in results for choice in part["value"].get("choices", ())}


def _row(row: dict[str, Any]) -> tuple[str, set[str]]:
    found = next((row[name] for name in LABEL_COLUMNS if row.get(name)), None)
    several = found["choices"] if isinstance(found, dict) else [str(found)] if found else []
    return _image(row), set(several)


def _image(row: dict[str, Any]) -> str:
    name = next((row[name] for name in IMAGE_COLUMNS if row.get(name)), None)
    if name is None:
        raise ValueError(f"none of its columns is called {', '.join(IMAGE_COLUMNS)}")
    return str(name)


def _ends(paths: list[str]) -> dict[str, str | None]:
    """Every end of a path (`a/b/c.jpg`, `b/c.jpg`, `c.jpg`) -> the path, or None if several paths have it."""
    ends: dict[str, str | None] = {}
    for path in paths:
        parts = path.split("/")
        for start in range(1, len(parts)):
            end = "/".join(parts[start:])
            ends[end] = None if end in ends else path
    return ends | {path: path for path in paths}


def _place(name: str, by_end: dict[str, str | None]) -> str | None:
    """The path of a picture. Label Studio names it by an address, and puts a random number before uploaded ones."""
    parts = unquote(name.replace("\\", "/")).rpartition("?d=")[2].split("/")
    ends = ["/".join(parts[start:]) for start in range(len(parts))]
    ends.append(re.sub(r"^[0-9a-f]{8}-", "", posixpath.basename(ends[0])))
    return next((by_end[end] for end in ends if by_end.get(end)), None)
