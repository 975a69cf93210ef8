"""CSV files whose cells spreadsheets show as text: names come from files of others, and `=1+1` would be computed."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

_FORMULA = re.compile(r"'*[=+\-@\t\r].", re.DOTALL)  # one such letter alone is no formula, and `-` is a label


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A header and a line per row; all rows have the same keys."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: guarded(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows)
    return file.getvalue()


def guarded(text: str) -> str:
    """The text with a quote before what a spreadsheet would take for a formula; numbers stay as they are."""
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if _FORMULA.match(text) else text


def unguarded(cell: str) -> str:
    """The text that `guarded` made this cell from."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
