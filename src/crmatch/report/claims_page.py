"""The page about tested claims: their picture beside it, and their numbers as Markdown or in one HTML file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import crmatch
from crmatch.atomic_files import write_file
from crmatch.paper.verdicts import COLUMNS, HOW_TO_READ, Results, rows_of, to_page
from crmatch.report.figures import draw_forest
from crmatch.report.rendering import render


def write_claims(results: Sequence[Results], out: Path, command: str) -> Path:
    """Write the page in the format of its extension, .md or .html, and the picture; returns the path of the picture."""
    picture = out.with_suffix(".png")
    draw_forest(results, picture)
    if out.suffix == ".md":
        write_file(out, to_page(results, picture.name, command).encode())
        return picture
    page = render(
        "claims.html",
        results=results,
        picture=f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}",
        notes=[" ".join(note.split()) for note in HOW_TO_READ.removeprefix("- ").split("\n- ")],
        columns=COLUMNS,
        rows_of=rows_of,
        command=command,
        version=crmatch.__version__,
    )
    write_file(out, page)
    return picture
