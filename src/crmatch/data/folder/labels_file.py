"""Changing lines of a labels.csv; the rest of the file stays as the user wrote it. Imports no torch."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from crmatch.atomic_files import write_file
from crmatch.data.folder.scan import COLUMNS, label_lines, normalized
from crmatch.data.spreadsheet import guarded, unguarded
from crmatch.errors import DataError, printable


def read_labels(file: Path, folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """The label of each line by the path of its picture; one of `paths`, however it is written in the file."""
    composed = {unicodedata.normalize("NFC", path): path for path in paths}
    lines = label_lines(file) if file.exists() else []
    return {composed.get(normalized(path, folder), path): label for path, label in lines}


def change_labels(file: Path, folder: Path, changes: Mapping[str, str | None]) -> None:
    """Set the labels of pictures (paths relative to `folder`), or remove their lines (None), and write the file atomically.

    Other lines, other columns and the delimiter stay.
    """
    if broken := [path for path in changes if "\r" in path]:
        raise DataError(f"{printable(broken[0])} has a line break in its name.\nRename the file; CSV files cannot name it.")
    text = "path,label\n"
    if file.exists():
        label_lines(file)  # raises an error that says what is wrong with the file
        text = file.read_text(encoding="utf-8-sig")
    delimiter = ";" if ";" in text.partition("\n")[0] else ","
    header, *rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]
    names = [COLUMNS.get(name, name) for name in (cell.strip().lower() for cell in header)]
    path_at, label_at = names.index("path"), names.index("label")
    composed = {unicodedata.normalize("NFC", path): path for path in changes}
    kept, changed = [header], set()
    for row in rows:
        row += [""] * (len(header) - len(row))
        written = unguarded(row[path_at].strip())
        path = written if written in changes else composed.get(normalized(written, folder))
        if path is not None:
            if path in changed or changes[path] is None:
                continue
            row[label_at] = guarded(changes[path] or "")
            changed.add(path)
        kept.append(row)
    for path, label in changes.items():
        if label is not None and path not in changed:
            # Spaces around a cell do not count, so a path that begins with one is written as ./path.
            cells = {"path": path if path == path.strip() else f"./{path}", "label": label}
            kept.append([guarded(cells.get(name, "")) for name in names])
    content = io.StringIO(newline="")
    csv.writer(content, delimiter=delimiter, lineterminator="\n").writerows(kept)
    write_file(file, content.getvalue().encode())
