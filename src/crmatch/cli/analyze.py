"""`crmatch report`, `probe`, `distances` and `figure`: what finished runs show, measured and drawn."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crmatch.cli.options import CodeOption, DataDirOption, JsonOption, RunArgument, print_rows, print_saved, workspace_at

if TYPE_CHECKING:
    from crmatch.analysis.curves import Summary

RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished runs, directories above them, or latest.")]
FigureOption = Annotated[Path, typer.Option("--out", help="Where to write the picture (.png, .svg, .pdf).")]
figure = typer.Typer(
    help="Draw the paper's figures: t-SNE, training curves, error over the threshold, the teaser's toy. "
    "Augmentations: crmatch show augmentations.",
    no_args_is_help=True,
)


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN...]", help="Finished runs, or directories above them (default: runs).")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Where to write the page.")] = Path("report.html"),
    data_dir: DataDirOption = None,
    code: CodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about finished runs: errors, curves, confusions, pictures, settings."""
    from crmatch.cli.display import Bar
    from crmatch.report.page import write_report

    command = shlex.join(["crmatch", *sys.argv[1:]])
    with Bar("runs", json_) as progress:
        written = write_report(runs or [Path("runs")], out, command, workspace_at(data_dir), progress)
    if json_:
        typer.echo(json.dumps({"report": str(out), "runs": [str(path) for path in written]}))
    else:
        typer.echo(f"Report ({len(written)} run{'s' * (len(written) > 1)}): {out.resolve()}")


def probe(
    run: RunArgument,
    repeats: Annotated[int, typer.Option("--repeats", help="Splits of the test images, each with its own draws.")] = 10,
    data_dir: DataDirOption = None,
    code: CodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Measure equivariance: the error of a linear SVM that tells transformed from original images (50 %: it cannot)."""
    from crmatch.analysis.probe import probe as measure
    from crmatch.cli.display import Bar

    with Bar("repeats", label="probing") as progress:
        result = measure(run, workspace_at(data_dir), repeats=repeats, progress=progress)
    _print_summaries(run, "transformation", "probe error %", result, 2, json_)


def distances(run: RunArgument, data_dir: DataDirOption = None, code: CodeOption = None, json_: JsonOption = False) -> None:
    """Measure how far augmentation moves features: cosine between original, weak and strong views of the test images."""
    from crmatch.analysis.similarities import similarities

    result = similarities(run, workspace_at(data_dir))
    _print_summaries(run, "pair", "cosine similarity", result, 3, json_)


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


@figure.command("tsne")
def draw_tsne(
    runs: RunsArgument,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Only these classes, e.g. caterpillar,butterfly,crab.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Draw at most this many unlabeled images.")] = 2000,
    out: FigureOption = Path("tsne.png"),
    data_dir: DataDirOption = None,
    code: CodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Draw t-SNE of the features of unlabeled images, models side by side."""
    from crmatch.analysis.embedding import embed
    from crmatch.report.figures import draw_embedding
    from crmatch.runs.finished import find_runs

    found = find_runs(runs)
    embedding = embed(found, workspace_at(data_dir), classes.split(",") if classes else None, limit=limit)
    draw_embedding(embedding, out)
    print_saved(out, {"runs": [str(path) for path in found], "images": len(embedding.labels)}, json_)


@figure.command("curves")
def draw_training_curves(runs: RunsArgument, out: FigureOption = Path("curves.png"), json_: JsonOption = False) -> None:
    """Draw pseudo-label error, error of contributing images and their share over training."""
    from crmatch.analysis.curves import pseudo_label_curves
    from crmatch.errors import RequestError
    from crmatch.report.figures import draw_curves
    from crmatch.runs.finished import find_runs, short_names

    names = short_names(find_runs(runs))
    curves = {str(path): pseudo_label_curves(path) for path in names}
    if empty := [path for path, found in curves.items() if not found]:
        raise RequestError(f"{empty[0]} has no pseudo-label curves.\nLeave it out: its method makes no pseudo-labels.")
    draw_curves(dict(zip(names.values(), curves.values(), strict=True)), out)
    print_saved(out, {"curves": curves}, json_)


@figure.command("threshold")
def draw_threshold_curve(runs: RunsArgument, out: FigureOption = Path("threshold.png"), json_: JsonOption = False) -> None:
    """Draw test error over the confidence threshold, from runs that differ in threshold, split and seed only."""
    from crmatch.analysis.curves import threshold_curve
    from crmatch.methods import title_of
    from crmatch.report.figures import draw_threshold
    from crmatch.runs.finished import find_runs, read_record

    records = [read_record(path) for path in find_runs(runs)]
    errors = threshold_curve(records)
    spec = records[0].spec
    draw_threshold(errors, f"{title_of(spec.method)} on {spec.setting}", out)
    print_saved(out, {"errors": [{"threshold": value, **one._asdict()} for value, one in errors.items()]}, json_)


@figure.command("teaser")
def draw_toy(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Toys trained for the error in the titles.")] = 5,
    out: FigureOption = Path("teaser.png"),
    json_: JsonOption = False,
) -> None:
    """Draw the left half of Figure 1: features of a two-class toy, without a feature distance, pulled and pushed apart."""
    from crmatch.analysis.curves import summarize
    from crmatch.analysis.toy import MODES, train_toy
    from crmatch.report.figures import draw_teaser

    toys = {mode: [train_toy(mode, seed) for seed in range(seeds)] for mode in MODES}
    errors = {mode: summarize([toy.error for toy in trained]) for mode, trained in toys.items()}
    draw_teaser({mode: trained[0] for mode, trained in toys.items()}, errors, out)
    print_saved(out, {"errors": {mode: summary._asdict() for mode, summary in errors.items()}}, json_)
