"""Arguments and options that several commands share, and the spec that they ask for."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from crmatch.atomic_files import MOST_TEXT, read_file
from crmatch.errors import RequestError

if TYPE_CHECKING:
    from crmatch.runs.workspace import Workspace
    from crmatch.spec.run_spec import RunSpec


def _one_run(path: Path | None) -> Path | None:
    from crmatch.runs.finished import find_run

    return path and find_run(path)


def _name_files(files: list[Path] | None) -> list[Path] | None:
    from crmatch.own_code import name_file

    for file in files or []:
        name_file(file)
    return files


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", callback=_one_run, help="Directory of a finished run, or above it if it is the only one; or latest."
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="RUN", callback=_one_run, help="Train as RUN was trained, with the labels there are now, and compare."
    ),
]
CodeOption = Annotated[
    list[Path] | None,
    typer.Option("--code", callback=_name_files, help="Your file with the data set or network of the run; repeatable."),
]
NetworkOption = Annotated[
    str | None, typer.Option("--network", help="wrn-28-2, resnet-18, ... or your own: path/mine.py:function.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the run's folder (default: the method and what differs from its recipe).")
]
SettingArgument = Annotated[
    str,
    typer.Argument(
        metavar="SETTING|FOLDER",
        help="DATASET@LABELS_PER_CLASS, e.g. cifar10@25; a folder of pictures; mine.py:function@4.",
    ),
]
LabelsOption = Annotated[
    Path | None, typer.Option("--labels", help="CSV file path,label, as crmatch review writes it; wins over a folder's own.")
]
MethodOption = Annotated[
    str, typer.Option("--method", "-m", help="Method, as crmatch show methods lists them; or mine.py:ClassName.")
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe", help="paper, usb, original, quick, head or tune (default: paper for its data sets, else quick or head)."
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="Where runs are kept.")]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Where packed .npz sets are kept (default: $CRMATCH_DATA or the cache).")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change one key, e.g. method.threshold=0.9; repeatable.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="JSON file with keys to change; --set wins over it.")]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Length of the run; short for --set plan.steps=N.")]
PolicyOption = Annotated[str | None, typer.Option("--policy", help="Strong augmentation: randaugment or ctaugment.")]
ImageSizeOption = Annotated[int | None, typer.Option("--image-size", help="Side of the training images in pixels.")]
BackboneOption = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        help="Pretrained network: efficientnet-lite0 (default for folders), hf:NAME, timm:NAME, or none.",
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=0.1,
        help="Train as long as fits into this time; from 5 minutes on, quick begins with images of 20 px and ends with 32.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps (Apple GPU).")]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile the network: may be faster, equal only up to rounding.")
]
RecomputeOption = Annotated[
    bool, typer.Option("--recompute", help="Recompute activations in the backward pass: less memory, a third slower.")
]
EngineOption = Annotated[Literal["local", "ray"], typer.Option("--engine", help="Train on this machine, or on a Ray cluster.")]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", min=1, max=256, help="Runs at once (default: 1; with Ray as many as the cluster has room for)."),
]
RayAddressOption = Annotated[
    str | None, typer.Option("--ray-address", help="HOST:PORT of a Ray cluster, or auto (default: one of this machine).")
]
CpusPerRunOption = Annotated[
    int | None, typer.Option("--cpus-per-run", min=1, max=1024, help="Cores of each run on a Ray cluster (default: 1).")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only list missing runs: commands and estimated cost.")]
RecordsOption = Annotated[Path | None, typer.Option("--records", help="Use the records in this directory; train nothing.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]


def read_changes(config: Path | None, assignments: list[str] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys to change: those of the file, then the named options, then --set."""
    from crmatch.spec.run_spec import flatten, parse_assignments

    changes: dict[str, Any] = {}
    if config is not None:
        try:
            values = json.loads(read_file(config, MOST_TEXT).decode())
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not JSON, {error}"
            raise RequestError(f"--config {config} cannot be read: {reason}.\nIt must hold one JSON object.") from error
        if not isinstance(values, dict):
            raise RequestError(f"--config {config} holds a {type(values).__name__}.\nIt must hold one JSON object.")
        # Networks of different kinds have different keys, so a network with its kind replaces that of the recipe as a whole.
        network = values.get("network")
        whole = {"network": values.pop("network")} if isinstance(network, dict) and "kind" in network else {}
        changes |= dict(flatten(values)) | whole
    changes |= {key: value for key, value in options.items() if value is not None}
    return changes | parse_assignments(assignments or [])


def make_spec(
    setting: str,
    method: str,
    recipe: str | None,
    data_dir: Path | None,
    changes: dict[str, Any],
    labels: Path | None = None,
    backbone: str | None = None,
) -> RunSpec:
    """The spec of a recipe with some keys changed."""
    from crmatch.data.settings import parse_setting
    from crmatch.spec.recipes import DEFAULT_BACKBONE
    from crmatch.spec.recipes import recipe as make
    from crmatch.spec.run_spec import replace

    spec = make(parse_setting(setting, data_dir, labels), method, recipe, backbone or DEFAULT_BACKBONE)
    for key, there in (("setting", spec.setting), ("recipe", spec.recipe)):
        if changes.get(key, there) != there:
            asked = f"{key} cannot be changed to {changes[key]!r}: this is {there!r}"
            raise RequestError(f"{asked}.\nName the setting as argument, and the recipe by --recipe.")
    return replace(spec, **changes)


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table, or as one JSON object."""
    from crmatch.cli.display import print_table

    if as_json:
        typer.echo(json.dumps({"rows": rows}))
    else:
        print_table(rows)


def print_saved(picture: Path, values: dict[str, Any], as_json: bool) -> None:
    """Where a picture was saved; as JSON together with the values it shows."""
    typer.echo(json.dumps({"picture": str(picture), **values}) if as_json else f"Saved in {picture}")


def short_path(path: Path) -> str:
    """A path as the user would type it: relative if it is below the current directory."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def next_round(folder_or_setting: str, run: Path | None, *options: str) -> str:
    """The command that trains the round after `run`, quoted for a shell."""
    where = short_path(Path(folder_or_setting)) if os.sep in folder_or_setting else folder_or_setting
    return shlex.join(["crmatch", "train", where, *(["--from", short_path(run)] if run else []), *options])


def workspace_at(data_dir: Path | None) -> Workspace:
    """The workspace of a command with `--data-dir`."""
    from crmatch.runs.workspace import Workspace

    return Workspace.at(data_dir=data_dir)


def is_main_process() -> bool:
    """Whether this process has rank 0 and therefore prints."""
    return int(os.environ.get("RANK", "0")) == 0
