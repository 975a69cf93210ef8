"""Commands that use a trained model: predict, export, review, suggest."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from crmatch.cli.options import DataDirOption, JsonOption, RunArgument, print_rows
from crmatch.errors import DataError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from crmatch.predict.model import Model

MOST_NAMED = 20
CHECKED_IMAGES = 500


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run, or of its model.")],
    pictures: Annotated[list[Path], typer.Argument(metavar="PICTURES...", help="Picture files, and folders of them.")],
    out: Annotated[Path | None, typer.Option("--out", help="A .csv or .json file (default: CSV on stdout).")] = None,
    abstain: Annotated[float, typer.Option("--abstain", help="Leave the class empty below this confidence.")] = 0.0,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Add the probability of every class.")] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Images that go through the network together.")] = 256,
) -> None:
    """Predict the classes of pictures; those that cannot be read are named and left empty."""
    if out is not None and out.suffix not in (".csv", ".json"):
        raise RequestError(f"--out {out} is neither .csv nor .json.\nName a .csv or .json file.")
    if not 0 <= abstain <= 1 or batch_size < 1:
        raise RequestError(f"--abstain {abstain} or --batch-size {batch_size} is out of range.\nUse 0..1, and 1 or more.")
    from crmatch.atomic_files import write_file
    from crmatch.cli.display import PictureProgress
    from crmatch.predict.model import load
    from crmatch.predict.picture_files import list_pictures, predict_files

    model, paths = load(run), list_pictures(pictures)
    with PictureProgress() as progress:
        found = predict_files(model, paths, batch_size, progress)
    for row, reason in list(found.unreadable.items())[:MOST_NAMED]:
        typer.echo(f"cannot be read: {paths[row]}: {reason}", err=True)
    if len(found.unreadable) > MOST_NAMED:
        typer.echo(f"and {len(found.unreadable) - MOST_NAMED:,} more that cannot be read", err=True)
    as_text = found.to_json if out is not None and out.suffix == ".json" else found.to_csv
    text = as_text(abstain, probabilities)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_file(out, text.encode())
        typer.echo(f"{len(paths) - len(found.unreadable):,} pictures predicted: {out}")


def export(
    run: RunArgument,
    form: Annotated[Literal["torch", "onnx"], typer.Option("--format", help="torch (torch.export, .pt2) or onnx.")] = "torch",
    out: Annotated[Path | None, typer.Option("--out", help="File to write (default: model.pt2 or model.onnx in RUN).")] = None,
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Write the model for other programs: uint8 (N, C, H, W) in, probabilities out; compared with our own answer."""
    from crmatch.predict.export import export_model
    from crmatch.predict.model import load

    model = load(run)
    images, kind = _images_to_check(run, model, data_dir)
    target = out or run / ("model.pt2" if form == "torch" else "model.onnx")
    difference = export_model(model, form, target, images)
    if json_:
        values = {"file": str(target), "largest_difference": difference, "checked_images": len(images), "kind": kind}
        typer.echo(json.dumps(values))
    else:
        size, channels = model.image_size, model.channels
        typer.echo(f"{target}: uint8 (N, {channels}, {size}, {size}) -> probabilities (N, {len(model.class_names)})")
        typer.echo(f"largest difference from the model on {len(images):,} images ({kind}): {difference:.2g}")


def review(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("review.html"),
    most: Annotated[int | None, typer.Option("--most", min=1, help="Only this many, the least certain (default: all).")] = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write a page of the unlabeled pictures with what the model believes, to confirm and correct labels."""
    from crmatch.predict.label_suggestions import read_run
    from crmatch.report.review import write_review

    reviewed = read_run(run, data_dir)
    count = write_review(reviewed, out, most)
    typer.echo(f"{count:,} pictures to review: {out}")
    where = reviewed.spec.data.folder or reviewed.spec.setting
    typer.echo(f"Open it in a browser, download labels.csv, then: crmatch train {shlex.quote(where)} --labels labels.csv")


def suggest(
    run: RunArgument,
    count: Annotated[int, typer.Option("-n", min=1, help="How many pictures.")] = 20,
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Say which unlabeled pictures are worth labeling next, and why."""
    from crmatch.predict.label_suggestions import read_run
    from crmatch.predict.label_suggestions import suggest as choose

    found = choose(read_run(run, data_dir), count)
    print_rows([{"picture": item.name, "why": item.reason} for item in found], json_)


def _images_to_check(run: Path, model: Model, data_dir: Path | None) -> tuple[Tensor, str]:
    """Images to compare an exported model on: those of the run, or noise where they are gone."""
    import torch

    from crmatch.data.images import resize
    from crmatch.randomness import generator
    from crmatch.runs.directory import RunDirectory
    from crmatch.runs.experiment import load_run_data
    from crmatch.spec.recipes import setting_of

    try:
        spec = RunDirectory(run).read_spec()
        if spec is None:
            raise DataError(f"{run} has no spec.json")
        data, _ = load_run_data(spec, setting_of(spec, data_dir), data_dir)
        part = data.test or data.train
        return resize(part.images[:CHECKED_IMAGES], model.image_size).contiguous(), "of its data"
    except (DataError, RequestError):
        shape = (CHECKED_IMAGES, model.channels, model.image_size, model.image_size)
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator(0, "export")), "noise: its data is not here"
