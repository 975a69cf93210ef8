"""Tiny finished runs for tests of analyses and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import tiny_spec, write_packed

HOSTILE_NAMES = ("<script>alert(1)</script>", 'salt & "pepper" \'n', "Größe $x$ 🐈")


def train_tiny(out: Path, data_dir: Path, method: str = "crmatch", **changes: Any) -> Path:
    """Train 20 steps on stripes; returns the run's directory."""
    from crmatch.runs.run import run
    from crmatch.runs.workspace import Workspace

    spec = tiny_spec(data_dir, method, **changes)
    run(spec, out, data_dir=data_dir, device="cpu")
    return Workspace(out, data_dir).run_directory(spec).path


def stripes_in(folder: Path, **changes: Any) -> Path:
    """A data directory with the packed set `stripes`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_packed(folder / "stripes.npz", **changes)
    return folder
