"""Commands `crmatch train` and `crmatch evaluate`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from crmatch.cli.options import (
    ConfigOption,
    DataDirOption,
    ImageSizeOption,
    JsonOption,
    LabelsOption,
    MethodOption,
    PolicyOption,
    RecipeOption,
    RecomputeOption,
    RunArgument,
    SetOption,
    SettingArgument,
    StepsOption,
    make_spec,
    read_changes,
)
from crmatch.runs.signals import stop_request

if TYPE_CHECKING:
    from crmatch.runs.directory import RunDirectory
    from crmatch.runs.experiment import Progress
    from crmatch.runs.record import RunRecord
    from crmatch.spec.run_spec import RunSpec


def train(
    setting: SettingArgument,
    method: MethodOption = "crmatch",
    split: Annotated[int | None, typer.Option("--split", help="Which of the fixed splits, 1 (default) to 5.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of everything but the split (default 0).")] = None,
    recipe: RecipeOption = None,
    steps: StepsOption = None,
    policy: PolicyOption = None,
    image_size: ImageSizeOption = None,
    labels: LabelsOption = None,
    baseline: Annotated[
        bool | None,
        typer.Option("--baseline/--no-baseline", help="Also train supervised-only on the same labels (default: for folders)."),
    ] = None,
    data_dir: DataDirOption = None,
    out: Annotated[Path, typer.Option("--out", help="Where runs are kept.")] = Path("runs"),
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str | None, typer.Option("--precision", help="fp32 (default), fp64, bf16 or fp16 (GPU).")] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the network: takes a minute, may be faster, equal up to rounding only.")
    ] = False,
    recompute: RecomputeOption = False,
    set_: SetOption = None,
    config: ConfigOption = None,
    resume: Annotated[
        Literal["auto", "never"], typer.Option("--resume", help="auto continues an unfinished run; never refuses to.")
    ] = "auto",
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write the curves for TensorBoard, into RUN/tensorboard/.")
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Train a method on a setting or on your own pictures; the same command again continues, or returns the finished record."""
    from crmatch.cli.display import print_records

    options = {"plan.steps": steps, "augmentation.policy": policy, "data.image_size": image_size}
    changes = read_changes(config, set_, {**options, "precision": precision, "split": split, "seed": seed})
    specs = [make_spec(setting, method, recipe, data_dir, changes, labels)]
    if baseline is None:
        baseline = specs[0].data.folder is not None
    if baseline and method != "supervised":
        shared = {key: value for key, value in changes.items() if key != "method" and not key.startswith("method.")}
        specs.append(make_spec(setting, "supervised", recipe, data_dir, shared, labels))
    if is_main_process():
        _look_at_pictures(specs, data_dir, recompute, quiet=json_)
    from crmatch.distributed.process_group import join
    from crmatch.runs.run import run

    stop, processes = stop_request(), join()
    records = []
    for spec in specs:
        events = _directory(spec, out, data_dir) if tensorboard and is_main_process() else None
        with _watch(spec, events, quiet=json_ or not is_main_process()) as progress:
            machine: dict[str, Any] = {"device": device, "compile": compile, "recompute": recompute, "processes": processes}
            records.append(run(spec, out, data_dir=data_dir, resume=resume, progress=progress, stop=stop, **machine))
    if not is_main_process():
        return
    if json_:
        values = [_summary(record, out, data_dir) for record in records]
        typer.echo(json.dumps({**values[0], "baseline": values[1] if len(values) > 1 else None}))
    else:
        print_records(records, [_directory(record.spec, out, data_dir).path for record in records])


def evaluate(
    run: RunArgument,
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Evaluate a finished run's model on its test set again."""
    from crmatch.analysis.finished_run import open_run
    from crmatch.cli.display import print_evaluation
    from crmatch.evaluation import measure
    from crmatch.runs.workspace import Workspace

    finished = open_run(run, Workspace.at(data_dir=data_dir))
    test = finished.test
    quality = measure(finished.model.predict_probabilities(test.images), test.labels)
    if json_:
        typer.echo(json.dumps({"run": str(run), "test_images": len(test), **quality._asdict()}))
    else:
        print_evaluation(run, finished.record, quality, len(test))


def is_main_process() -> bool:
    """Whether this process has rank 0 and therefore prints."""
    return int(os.environ.get("RANK", "0")) == 0


def _look_at_pictures(specs: list[RunSpec], data_dir: Path | None, recompute: bool, quiet: bool) -> None:
    """Decode a folder's pictures with a progress bar and say what was found, before anything heavy is imported."""
    spec = specs[0]
    if spec.data.folder is None:
        return
    from crmatch.cli.display import Bar
    from crmatch.data.folder.preflight import preflight
    from crmatch.data.folder.scan import read_folder, scan_folder
    from crmatch.data.settings import default_data_dir
    from crmatch.methods import METHODS
    from crmatch.runs.cost import describe_cost, estimate
    from crmatch.spec.recipes import setting_of

    labels_file = Path(spec.data.labels_file) if spec.data.labels_file else None
    index = scan_folder(Path(spec.data.folder), labels_file)
    with Bar("pictures", quiet) as progress:
        decoded = read_folder(index, spec.data.image_size, (data_dir or default_data_dir()) / "folders", progress)
    if not quiet:
        typer.echo("\n".join(preflight(index, decoded).lines()), err=True)
        if spec.augmentation.mirror:
            typer.echo("mirror images count as the same class; not so with text? --set augmentation.mirror=false", err=True)
        for one in specs:
            cost = describe_cost(estimate(one, setting_of(one, data_dir), recompute))
            typer.echo(f"{METHODS[one.method.name].title}: {cost}", err=True)


@contextmanager
def _watch(spec: RunSpec, events: RunDirectory | None, quiet: bool) -> Iterator[Progress]:
    """Who watches a run: the terminal, and TensorBoard's files where they are wanted."""
    from crmatch.cli.display import Display

    with Display(spec, quiet) as display:
        if events is None:
            yield display
            return
        from crmatch.cli.tensorboard import EventFile

        with EventFile(events, beside=display) as both:
            yield both


def _directory(spec: RunSpec, out: Path, data_dir: Path | None) -> RunDirectory:
    from crmatch.runs.directory import run_directory
    from crmatch.spec.recipes import setting_of

    return run_directory(out, spec, setting_of(spec, data_dir))


def _summary(record: RunRecord, out: Path, data_dir: Path | None) -> dict[str, Any]:
    return {"run": str(_directory(record.spec, out, data_dir).path), "error": record.error, **record.model_dump(mode="json")}
