"""Commands that use a trained model: `crmatch predict`, `export`, `review` and `suggest`."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from crmatch.cli.options import CodeOption, DataDirOption, JsonOption, RunArgument, next_round, print_rows, workspace_at
from crmatch.errors import DataError, RequestError, printable

if TYPE_CHECKING:
    from torch import Tensor

    from crmatch.predict.model import Model
    from crmatch.runs.workspace import Workspace
    from crmatch.spec.run_spec import RunSpec

MOST_NAMED = 20
"""Unreadable files that are listed; further ones are counted."""
CHECKED_IMAGES = 500


def predict(
    run: RunArgument,
    pictures: Annotated[list[Path], typer.Argument(metavar="PICTURES...", help="Picture files, and folders of them.")],
    out: Annotated[Path | None, typer.Option("--out", help="A .csv or .json file (default: CSV on stdout).")] = None,
    abstain: Annotated[float, typer.Option("--abstain", help="Leave the class empty below this confidence, e.g. 0.8.")] = 0.0,
    abstain_error: Annotated[
        float | None,
        typer.Option("--abstain-error", help="Leave so many empty that at most this percentage of answers is wrong."),
    ] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add the probability of every class.")] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Images per pass through the network.")] = 256,
    code: CodeOption = None,
) -> None:
    """Predict the classes of pictures; unreadable files are listed and get no class."""
    if not 0 <= abstain <= 1:
        guess = f"Did you mean {abstain / 100:g}?" if 1 < abstain <= 100 else "Use 0 to 1."
        raise RequestError(f"--abstain {abstain:g} is not a confidence from 0 to 1.\n{guess}")
    if out is not None and out.suffix not in (".csv", ".json"):
        raise RequestError(f"--out {out} is neither .csv nor .json.\nName a .csv or .json file.")
    from crmatch.atomic_files import write_file
    from crmatch.cli.display import Bar
    from crmatch.predict.model import load
    from crmatch.predict.picture_files import list_pictures, predict_files

    model, paths = load(run), list_pictures(pictures)
    if abstain_error is not None:
        abstain = _confidence_for(abstain_error, abstain, model)
    with Bar("pictures") as progress:
        found = predict_files(model, paths, batch_size, progress)
    for row, reason in list(found.unreadable.items())[:MOST_NAMED]:
        typer.echo(printable(f"unreadable: {paths[row]}: {reason}"), err=True)
    if (more := len(found.unreadable) - MOST_NAMED) > 0:
        typer.echo(f"and {more:,} more unreadable files", err=True)
    typer.echo(_how_often_right(model, abstain), err=True)
    text = found.text("json" if out and out.suffix == ".json" else "csv", abstain, probabilities)
    if out is None:
        # A terminal obeys control characters in names of files; programs must get the names as they are.
        sys.stdout.write("".join(f"{printable(line)}\n" for line in text.splitlines()) if sys.stdout.isatty() else text)
    else:
        write_file(out, text.encode())
        typer.echo(f"{len(paths) - len(found.unreadable):,} pictures predicted: {out}")


def export(
    run: RunArgument,
    form: Annotated[Literal["torch", "onnx"], typer.Option("--format", help="torch (torch.export, .pt2) or onnx.")] = "torch",
    out: Annotated[Path | None, typer.Option("--out", help="File to write (default: model.pt2 or model.onnx in RUN).")] = None,
    data_dir: DataDirOption = None,
    code: CodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Export the model: uint8 (N, C, H, W) in, probabilities out; the file is checked against the model."""
    from crmatch.cli.display import Bar
    from crmatch.predict.export import SCRIPT, export_model
    from crmatch.predict.model import load

    model = load(run)
    images, kind = _images_to_check(run, model, workspace_at(data_dir))
    target = out or run / ("model.pt2" if form == "torch" else "model.onnx")
    with Bar("files", json_, "exporting") as progress:
        progress(0, 1)
        difference = export_model(model, form, target, images)
        progress(1, 1)
    if json_:
        values = {"file": str(target), "largest_difference": difference, "checked_images": len(images), "kind": kind}
        typer.echo(json.dumps(values))
    else:
        shape = ", ".join(map(str, images.shape[1:]))
        typer.echo(f"{target}: uint8 (N, {shape}) -> probabilities (N, {len(model.class_names)})")
        typer.echo(f"largest difference from the model on {len(images):,} images ({kind}): {difference:.2g}")
        if form == "onnx":
            script = shlex.quote(str(target.with_name(SCRIPT)))
            typer.echo(f"Without crmatch: python {script} {shlex.quote(str(target))} PICTURES...")


def review(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("review.html"),
    most: Annotated[int | None, typer.Option("--most", min=1, help="Only this many, those most worth a label.")] = None,
    data_dir: DataDirOption = None,
    code: CodeOption = None,
) -> None:
    """Write the page of crmatch label to a file that needs no server, e.g. to label on another computer."""
    from crmatch.cli.display import Bar
    from crmatch.predict.label_suggestions import read_run
    from crmatch.report.review import write_review

    with Bar("views", label="predicting") as progress:
        reviewed = read_run(run, workspace_at(data_dir), progress)
    with Bar("pictures") as progress:
        count = write_review(reviewed, out, most, progress)
    typer.echo(f"{count:,} pictures to review: {out}")
    command = _next_command(reviewed.run.record.spec, run, Path("labels.csv"))
    typer.echo(f"Open it in a browser, download labels.csv, then: {command}")


def suggest(
    run: RunArgument,
    count: Annotated[int, typer.Option("-n", min=1, help="How many pictures.")] = 20,
    out: Annotated[Path | None, typer.Option("--out", help="A CSV file to fill in, with the labels there are.")] = None,
    data_dir: DataDirOption = None,
    code: CodeOption = None,
    json_: JsonOption = False,
) -> None:
    """Suggest which unlabeled pictures to label next, with the reasons."""
    from crmatch.atomic_files import write_file
    from crmatch.cli.display import Bar
    from crmatch.data.spreadsheet import csv_text
    from crmatch.predict.label_suggestions import read_run
    from crmatch.predict.label_suggestions import suggest as choose

    with Bar("views", label="predicting") as progress:
        reviewed = read_run(run, workspace_at(data_dir), progress)
    found = choose(reviewed, count)
    if out is None or json_:
        print_rows([{"picture": item.name, "why": item.reason} for item in found], json_)
    if out is not None:
        rows = [(item.name, "", item.reason) for item in found] + [(*line, "") for line in reviewed.lines.items()]
        write_file(out, csv_text([dict(zip(("path", "label", "why"), row, strict=True)) for row in rows]).encode())
        command = _next_command(reviewed.run.record.spec, run, out)
        typer.echo(f"{len(found)} pictures to label: {out}\nFill in the column label, then: {command}", err=json_)


def _next_command(spec: RunSpec, run: Path, labels: Path) -> str:
    return next_round(spec.data.folder or spec.setting, run, "--labels", str(labels))


def _confidence_for(error: float, abstain: float, model: Model) -> float:
    """The confidence below which answers are left out, so that at most `error` percent of the others are wrong."""
    from crmatch.runs.calibration import CERTAINTY

    if abstain:
        raise RequestError("--abstain and --abstain-error were both given.\nUse one of them, for example --abstain-error 5.")
    if not 0 < error < 100:
        raise RequestError(f"--abstain-error {error:g} is not a percentage between 0 and 100.\nFor 5 %: --abstain-error 5")
    if model.calibration is None:
        found = "this model was never measured on a test set or on held-out labels"
        raise RequestError(f"{found}.\nUse --abstain, or train again with pictures in test/<class>/.")
    confidence, pictures = model.calibration.confidence_for(error / 100), model.calibration.describe_pictures()
    if confidence is None:
        lowest = f"--abstain-error {math.ceil(100 * model.calibration.lowest_limit)}"
        raise RequestError(
            f"no confidence makes sure that at most {error:g} % of the answers are wrong, judged by {pictures}.\n"
            f"The lowest that they allow is {lowest}; more test pictures or labels allow less."
        )
    certainty = f"with {100 * CERTAINTY:.0f} % certainty"
    chosen = f"--abstain {confidence:.2f}: at most {error:g} % of such answers are wrong ({certainty})"
    typer.echo(f"{chosen}, judged by {pictures}", err=True)
    return confidence


def _how_often_right(model: Model, abstain: float) -> str:
    """How often answers of at least this confidence were right, in words."""
    from crmatch.runs.record import describe_error

    if model.calibration is None:
        return "These confidences are not calibrated, and may be far too high: the model was never measured on held-out labels."
    (count, right), pictures = model.calibration.above(abstain), model.calibration.describe_pictures()
    level = f" of a confidence of {abstain:g} or more" if abstain else ""
    if not count:
        return f"On {pictures}, there was no answer{level}."
    result = describe_error(100 * (1 - right / count), count)
    return f"On {pictures}, {right:,} of {count:,} answers{level} were right: error {result}."


def _images_to_check(run: Path, model: Model, workspace: Workspace) -> tuple[Tensor, str]:
    """Images to compare an exported model on: the run's test or training images, or noise if its data is gone."""
    import torch

    from crmatch.randomness import generator
    from crmatch.runs.finished import read_record

    try:
        data, _ = workspace.load(read_record(run).spec)
        return (data.test or data.train).images[:CHECKED_IMAGES].contiguous(), "of its data"
    except (DataError, RequestError):
        shape = (CHECKED_IMAGES, model.channels, model.image_size, model.image_size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator(0, "export")), "noise: its data is not here"
