"""`crmatch report`, `probe` and `distances`: what can be seen and measured on finished runs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crmatch.cli_figure import figure
from crmatch.cli_options import DataDirOption, JsonOption, RunArgument, print_rows

if TYPE_CHECKING:
    from crmatch.analysis.curves import Summary


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


def probe(
    run: RunArgument,
    repeats: Annotated[int, typer.Option("--repeats", help="Splits of the test images, each with its own draws.")] = 10,
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Measure what features still know: a linear SVM tells transformed from original images (near 50 %: it cannot)."""
    from crmatch.analysis.probe import probe as measure

    result = measure(run, repeats=repeats, data_dir=data_dir)
    _print_summaries(run, "transformation", "probe error %", result, 2, json_)


def distances(run: RunArgument, data_dir: DataDirOption = None, json_: JsonOption = False) -> None:
    """Measure how far augmentation moves features: cosine between original, weak and strong views of the test images."""
    from crmatch.analysis.similarities import similarities

    _print_summaries(run, "pair", "cosine similarity", similarities(run, data_dir=data_dir), 3, json_)


def register(app: typer.Typer) -> None:
    """Add the commands of this module and `crmatch figure`."""
    app.add_typer(figure, name="figure")
    for command in (report, probe, distances):
        app.command()(command)


def _print_summaries(run: Path, what: str, value: str, result: Mapping[str, Summary], digits: int, as_json: bool) -> None:
    """Mean and deviation of each measurement as a table, or as one JSON object."""
    if as_json:
        typer.echo(json.dumps({"run": str(run), **{name: summary._asdict() for name, summary in result.items()}}))
        return
    rows = [
        {what: name, value: f"{summary.mean:.{digits}f} ± {summary.std:.{digits}f}", "n": summary.n}
        for name, summary in result.items()
    ]
    print_rows(rows, as_json=False)
