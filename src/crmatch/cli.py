"""The command line: one function call per command; heavy imports happen inside the commands."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from crmatch.errors import CRMatchError, RequestError

if TYPE_CHECKING:
    from crmatch.config import RunSpec
    from crmatch.results import RunRecord

app = typer.Typer(
    help="Train image classifiers from a handful of labels and a pile of unlabeled images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
show = typer.Typer(help="Show what there is: methods, settings, configurations, augmentations.", no_args_is_help=True)
app.add_typer(show, name="show")

SettingArgument = Annotated[str, typer.Argument(metavar="SETTING", help="DATASET@LABELS_PER_CLASS, e.g. digits@4, cifar10@25.")]
MethodOption = Annotated[str, typer.Option("--method", "-m", help="Method; crmatch show methods lists them.")]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", help="paper, usb, original or quick (default: paper for the paper's data sets, else quick)."),
]
DataDirOption = Annotated[
    Path | None, typer.Option("--data-dir", help="Where packed .npz sets lie (default: $CRMATCH_DATA or the cache).")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change one key, e.g. method.threshold=0.9; repeatable.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="JSON file with keys to change; --set comes after it.")]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Length of the run; short for --set plan.steps=N.")]
PolicyOption = Annotated[str | None, typer.Option("--policy", help="Strong policy: randaugment or ctaugment.")]
ImageSizeOption = Annotated[int | None, typer.Option("--image-size", help="Side of the training images in pixels.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]


@app.command()
def train(
    setting: SettingArgument,
    method: MethodOption = "crmatch",
    split: Annotated[int, typer.Option("--split", help="Which of the fixed splits, 1 to 5.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Seed of everything but the split.")] = 0,
    recipe: RecipeOption = None,
    steps: StepsOption = None,
    policy: PolicyOption = None,
    image_size: ImageSizeOption = None,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Also train supervised-only on the same labels.")
    ] = False,
    data_dir: DataDirOption = None,
    out: Annotated[Path, typer.Option("--out", help="Where runs are kept.")] = Path("runs"),
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str | None, typer.Option("--precision", help="fp32 (default) or fp64.")] = None,
    set_: SetOption = None,
    config: ConfigOption = None,
    resume: Annotated[
        Literal["auto", "never"], typer.Option("--resume", help="auto continues an unfinished run; never refuses to.")
    ] = "auto",
    json_: JsonOption = False,
) -> None:
    """Train a method on a setting; the same command again continues, or returns the finished record."""
    from crmatch.display import Display, print_records

    changes = _changes(config, set_, steps, policy, image_size, precision) | {"split": split, "seed": seed}
    specs = [_spec(setting, method, recipe, data_dir, changes)]
    if baseline and method != "supervised":
        shared = {key: value for key, value in changes.items() if not key.startswith("method.")}
        specs.append(_spec(setting, "supervised", recipe, data_dir, shared))
    stop = StopRequest()
    from crmatch.experiment import run

    records = []
    for spec in specs:
        with Display(spec, quiet=json_) as display:
            records.append(run(spec, out, data_dir=data_dir, device=device, resume=resume, progress=display, stop=stop))
    if json_:
        values = [_summary(record, out, data_dir) for record in records]
        typer.echo(json.dumps({**values[0], "baseline": values[1] if len(values) > 1 else None}))
    else:
        print_records(records, [_directory(record.spec, out, data_dir) for record in records])


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")],
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Evaluate a finished run's model on its test set again."""
    from crmatch.data.sets import load_data
    from crmatch.data.settings import parse_setting
    from crmatch.display import print_evaluation
    from crmatch.errors import DataError
    from crmatch.evaluation import measure
    from crmatch.inference import load
    from crmatch.results import RunDirectory

    model = load(run)
    record = RunDirectory(run).read_record()
    if record is None:
        raise DataError(f"{run} has no record.json: the run is not finished.\nThe command that began it continues it.")
    data = load_data(parse_setting(record.spec.setting, data_dir).data, data_dir, model.image_size)
    if data.test is None:
        raise DataError(f"the data of {run} has no test set.")
    quality = measure(model.predict_probabilities(data.test.images), data.test.labels)
    if json_:
        typer.echo(json.dumps({"run": str(run), "test_images": len(data.test), **quality._asdict()}))
    else:
        print_evaluation(run, record, quality, len(data.test))


@show.command("methods")
def show_methods(json_: JsonOption = False) -> None:
    """List all methods, each with one line and its paper."""
    from crmatch.display import print_table
    from crmatch.methods import METHODS, Preset

    rows = []
    for name, entry in METHODS.items():
        kind = entry.method if isinstance(entry, Preset) else entry
        rows.append({"name": name, "summary": (entry if isinstance(entry, Preset) else kind).summary, "paper": kind.paper})
    _print_rows(rows, json_, print_table)


@show.command("settings")
def show_settings(data_dir: DataDirOption = None, json_: JsonOption = False) -> None:
    """List data sets that can be asked for, with their defaults."""
    from crmatch.data.settings import default_data_dir, known_sets, parse_setting
    from crmatch.display import print_table
    from crmatch.recipes import default_recipe

    folder = data_dir or default_data_dir()
    rows: list[dict[str, Any]] = []
    for name in known_sets(folder):
        setting = parse_setting(f"{name}@1", folder)
        defaults = setting.defaults
        rows.append(
            {
                "data set": name,
                "labels per class": ", ".join(str(labels) for labels in defaults.labels_per_class) or "any",
                "image size": setting.image_size,
                "mirror": "yes" if defaults.mirror else "no",
                "network": defaults.network,
                "default recipe": default_recipe(setting),
            }
        )
    _print_rows(rows, json_, print_table)


@show.command("augmentations")
def show_augmentations(
    image: Annotated[Path | None, typer.Option("--image", help="Show this picture instead of a data set's.")] = None,
    setting: Annotated[str, typer.Option("--setting", help="Take images and mirroring of this setting.")] = "digits@4",
    out: Annotated[Path, typer.Option("--out", help="Where to write the picture.")] = Path("gallery.png"),
    table: Annotated[bool, typer.Option("--table", help="Print the table of transformations instead.")] = False,
    variant: Annotated[str, typer.Option("--variant", help="Which RandAugment.")] = "paper",
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Draw every operation over its range, 60 strong and 60 weak views, and weak above strong."""
    from crmatch.augment.variants import VARIANTS
    from crmatch.errors import unknown

    if variant not in VARIANTS:
        raise unknown("variant", variant, VARIANTS)
    from crmatch.data.settings import parse_setting
    from crmatch.display import print_table
    from crmatch.report import gallery

    if table:
        _print_rows(gallery.transformation_table(variant), json_, print_table)
        return
    chosen = parse_setting(setting, data_dir)
    if image is None:
        from crmatch.data.sets import load_data

        train = load_data(chosen.data, data_dir, chosen.image_size).train
        first = [int((train.labels == label).nonzero()[0, 0]) for label in range(min(train.classes, gallery.COLUMNS))]
        subject = gallery.Subject(train.images[first], chosen.defaults.mirror, chosen.data)
    else:
        subject = gallery.Subject(gallery.read_picture(image), True, image.name)
    gallery.draw_gallery(subject, out, variant)
    typer.echo(json.dumps({"picture": str(out)}) if json_ else f"The pictures are in {out}")


@show.command("data")
def show_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set, e.g. digits, or a setting.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write the picture.")] = Path("data.png"),
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Draw a contact sheet: a few pictures of every class under its name."""
    from crmatch.data.settings import parse_setting

    setting = parse_setting(name if "@" in name else f"{name}@1", data_dir)
    from crmatch.data.sets import load_data
    from crmatch.report.contact_sheet import draw_contact_sheet

    train = load_data(setting.data, data_dir).train
    draw_contact_sheet(train, f"{setting.data}: {len(train):,} training images, {train.classes} classes", out)
    typer.echo(json.dumps({"picture": str(out)}) if json_ else f"The picture is in {out}")


@show.command("config")
def show_config(
    setting: SettingArgument,
    method: MethodOption = "crmatch",
    recipe: RecipeOption = None,
    diff: Annotated[str | None, typer.Option("--diff", help="Show only what differs from this recipe.")] = None,
    steps: StepsOption = None,
    policy: PolicyOption = None,
    image_size: ImageSizeOption = None,
    data_dir: DataDirOption = None,
    set_: SetOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Show every key of a run's spec, or how two recipes differ."""
    from crmatch.config import differences, flatten
    from crmatch.display import print_table

    changes = _changes(config, set_, steps, policy, image_size, None)
    spec = _spec(setting, method, recipe, data_dir, changes)
    if diff is None:
        if json_:
            typer.echo(json.dumps(spec.to_json()))
        else:
            print_table([{"key": key, "value": json.dumps(value)} for key, value in flatten(spec.to_json())])
        return
    other = _spec(setting, method, diff, data_dir, changes)
    rows = [
        {"key": key, spec.recipe: json.dumps(one), other.recipe: json.dumps(two)}
        for key, (one, two) in differences(spec, other).items()
        if key != "recipe"
    ]
    if not rows and not json_:
        typer.echo(f"{spec.recipe} and {other.recipe} are the same for {method} on {setting}.")
    else:
        _print_rows(rows, json_, print_table)


class StopRequest:
    """Asks a run to save and end when a signal arrives; a second signal ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = number
        typer.echo("\nfinishing this step and saving; press again to end at once", err=True)

    def __call__(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None


def main() -> None:
    """Run a command; expected failures become two lines and their exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        app(standalone_mode=False)
    except CRMatchError as error:
        typer.echo(f"crmatch: {error}", err=True)
        raise SystemExit(130 if _interrupted() else error.exit_code) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except typer.TyperException as error:
        format_message = getattr(error, "format_message", error.__str__)
        typer.echo(f"crmatch: {format_message()}\nSee crmatch --help.", err=True)
        raise SystemExit(2) from None


def _interrupted() -> bool:
    handler = signal.getsignal(signal.SIGINT)
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, StopRequest) and owner.signal == signal.SIGINT


def _changes(
    config: Path | None,
    assignments: list[str] | None,
    steps: int | None,
    policy: str | None,
    image_size: int | None,
    precision: str | None,
) -> dict[str, Any]:
    """Dotted keys to change: those of the file, then the named options, then --set."""
    from crmatch.config import flatten, parse_assignments

    changes: dict[str, Any] = {}
    if config is not None:
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not JSON, {error}"
            raise RequestError(f"--config {config} cannot be read: {reason}.\nIt must hold one JSON object.") from error
        if not isinstance(values, dict):
            raise RequestError(f"--config {config} holds a {type(values).__name__}.\nIt must hold one JSON object.")
        changes |= dict(flatten(values))
    options = {
        "plan.steps": steps,
        "augmentation.policy": policy,
        "data.image_size": image_size,
        "precision": precision,
    }
    changes |= {key: value for key, value in options.items() if value is not None}
    return changes | parse_assignments(assignments or [])


def _spec(setting: str, method: str, recipe: str | None, data_dir: Path | None, changes: dict[str, Any]) -> RunSpec:
    from crmatch.config import replace
    from crmatch.data.settings import parse_setting
    from crmatch.recipes import recipe as make

    return replace(make(parse_setting(setting, data_dir), method, recipe), **changes)


def _directory(spec: RunSpec, out: Path, data_dir: Path | None) -> Path:
    from crmatch.data.settings import parse_setting
    from crmatch.results import run_directory

    return run_directory(out, spec, parse_setting(spec.setting, data_dir)).path


def _summary(record: RunRecord, out: Path, data_dir: Path | None) -> dict[str, Any]:
    return {"run": str(_directory(record.spec, out, data_dir)), "error": record.error, **record.model_dump(mode="json")}


def _print_rows(rows: list[dict[str, Any]], as_json: bool, print_table: Callable[[list[dict[str, Any]]], None]) -> None:
    if as_json:
        typer.echo(json.dumps({"rows": rows}))
    else:
        print_table(rows)
