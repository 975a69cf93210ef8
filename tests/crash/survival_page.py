"""docs/results/survival.md: each make target writes the table at the end of its own section."""

from __future__ import annotations

import platform
import re
import time
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "survival.md"


def write_table(section: str, command: str, began: float | None, rows: list[tuple[object, ...]]) -> None:
    """Replace the table of a section; `rows` begin with the header, `began` is of time.monotonic() or None for no time."""
    minutes = "" if began is None else f"{(time.monotonic() - began) / 60:.0f} minutes "
    written = f"Written by `{command}` ({minutes}on {platform.machine()})."
    header, *others = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    table = "\n".join([written, "", header, "|---" * len(rows[0]) + "|", *others, ""])
    pattern = re.compile(rf"(^## {re.escape(section)}\n.*?)^Written by .*?(?=\n## |\Z)", re.DOTALL | re.MULTILINE)
    page, found = pattern.subn(lambda match: match[1] + table, PAGE.read_text(), count=1)
    assert found, f"{PAGE} has no section {section!r} with a line that begins with Written by"
    PAGE.write_text(page)
    print(f"see {section!r} in {PAGE}")


def read_table(section: str) -> list[tuple[object, ...]]:
    """The rows of a section's table, without the header."""
    text = PAGE.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[1:]]
