"""Tiny finished runs for tests of analyses and reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import tiny_spec, write_packed

HOSTILE_NAMES = ("<script>alert(1)</script>", 'salt & "pepper" \'n', "Größe $x$ 🐈")


def train_tiny(out: Path, data_dir: Path, method: str = "crmatch", **changes: Any) -> Path:
    """Train 20 steps on stripes; returns the run's directory."""
    from crmatch.runs.directory import run_directory
    from crmatch.runs.run import run
    from crmatch.runs.workspace import Workspace
    from crmatch.spec.recipes import setting_of

    spec = tiny_spec(data_dir, method, **changes)
    run(spec, Workspace.at(out, data_dir))
    return run_directory(out, spec, setting_of(spec, data_dir)).path


def stripes_in(folder: Path, **changes: Any) -> Path:
    """A data directory with the packed set `stripes`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_packed(folder / "stripes.npz", **changes)
    return folder
