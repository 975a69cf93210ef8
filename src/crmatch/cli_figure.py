"""`crmatch figure`: the paper's figures from finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from crmatch.cli_options import DataDirOption, JsonOption

RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished runs, or directories above them.")]
figure = typer.Typer(
    help="Draw the paper's figures: t-SNE, training curves, error over the threshold, the teaser's toy. "
    "Augmentations: crmatch show augmentations.",
    no_args_is_help=True,
)


@figure.command("tsne")
def draw_tsne(
    runs: RunsArgument,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Only these classes, e.g. caterpillar,butterfly,crab.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", help="Draw at most so many unlabeled images.")] = 2000,
    out: Annotated[Path, typer.Option("--out", help="Where to write the picture (.png, .svg, .pdf).")] = Path("tsne.png"),
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Draw t-SNE of the features of unlabeled images, models side by side."""
    from crmatch.analysis.curves import find_runs
    from crmatch.analysis.embedding import embed
    from crmatch.report.figures import draw_embedding

    found = find_runs(runs)
    embedding = embed(found, classes.split(",") if classes else None, data_dir=data_dir, limit=limit)
    draw_embedding(embedding, out)
    _tell(out, {"runs": [str(path) for path in found], "images": len(embedding.labels)}, json_)


@figure.command("curves")
def draw_training_curves(
    runs: RunsArgument,
    out: Annotated[Path, typer.Option("--out", help="Where to write the picture (.png, .svg, .pdf).")] = Path("curves.png"),
    json_: JsonOption = False,
) -> None:
    """Draw pseudo-label error, error of contributing images and their share over training."""
    from crmatch.analysis.curves import find_runs, pseudo_label_curves
    from crmatch.errors import RequestError
    from crmatch.report.figures import draw_curves

    curves = {str(path): pseudo_label_curves(path) for path in find_runs(runs)}
    if empty := [path for path, found in curves.items() if not found]:
        raise RequestError(f"{empty[0]} has no pseudo-label curves.\nLeave it out: its method makes no pseudo-labels.")
    draw_curves(curves, out)
    _tell(out, {"curves": curves}, json_)


@figure.command("threshold")
def draw_threshold_curve(
    runs: RunsArgument,
    out: Annotated[Path, typer.Option("--out", help="Where to write the picture (.png, .svg, .pdf).")] = Path("threshold.png"),
    json_: JsonOption = False,
) -> None:
    """Draw test error over the confidence threshold, from runs that differ in threshold, split and seed only."""
    from crmatch.analysis.curves import find_runs, read_record, threshold_curve
    from crmatch.methods import METHODS
    from crmatch.report.figures import draw_threshold

    records = [read_record(path) for path in find_runs(runs)]
    errors = threshold_curve(records)
    spec = records[0].spec
    draw_threshold(errors, f"{METHODS[spec.method.name].title} on {spec.setting}", out)
    _tell(out, {"errors": [{"threshold": value, **one._asdict()} for value, one in errors.items()]}, json_)


@figure.command("teaser")
def draw_toy(
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Toys trained for the error in the titles.")] = 5,
    out: Annotated[Path, typer.Option("--out", help="Where to write the picture (.png, .svg, .pdf).")] = Path("teaser.png"),
    json_: JsonOption = False,
) -> None:
    """Draw the left half of Figure 1: features of a two-class toy, left alone, pulled together and pushed apart."""
    from crmatch.analysis.curves import summarize
    from crmatch.analysis.toy import MODES, train_toy
    from crmatch.report.figures import draw_teaser

    toys = {mode: [train_toy(mode, seed) for seed in range(seeds)] for mode in MODES}
    errors = {mode: summarize([toy.error for toy in trained]) for mode, trained in toys.items()}
    draw_teaser({mode: trained[0] for mode, trained in toys.items()}, errors, out)
    _tell(out, {"errors": {mode: summary._asdict() for mode, summary in errors.items()}}, json_)


def _tell(out: Path, values: dict[str, Any], as_json: bool) -> None:
    typer.echo(json.dumps({"picture": str(out), **values}) if as_json else f"The picture is in {out}")
