"""`crmatch report`, `figure`, `probe` and `distances`: what can be seen and measured on finished runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from crmatch.cli_options import DataDirOption, JsonOption

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")]
RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories of finished runs, or above them.")]


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN...]", help="Finished runs, or directories above them (default: runs).")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Where to write the page.")] = Path("report.html"),
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about finished runs: errors, curves, confusions, pictures, settings."""
    from crmatch.report.page import write_report

    command = shlex.join(["crmatch", *sys.argv[1:]])
    written = write_report(runs or [Path("runs")], out, command, data_dir)
    if json_:
        typer.echo(json.dumps({"report": str(out), "runs": [str(path) for path in written]}))
    else:
        typer.echo(f"The report about {len(written)} run{'s' * (len(written) > 1)} is in {out.resolve()}")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(report)
