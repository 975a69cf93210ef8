"""Commands `crmatch train` and `crmatch evaluate`.

crmatch train digits@4                       # CR-Match with four labels per class, a minute on a CPU
crmatch train my-photos/ --image-size 64     # your own pictures, with a supervised-only baseline
crmatch evaluate runs/digits@4/crmatch/split1-seed0
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from crmatch.cli import options
from crmatch.runs.signals import stop_request

if TYPE_CHECKING:
    from crmatch.runs.experiment import Progress
    from crmatch.runs.workspace import Workspace
    from crmatch.spec.run_spec import RunSpec
    from crmatch.training.execution import Execution


def train(
    setting: options.SettingArgument,
    method: options.MethodOption = "crmatch",
    split: Annotated[int | None, typer.Option("--split", help="Which of the fixed splits, 1 (default) to 5.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of everything but the split (default 0).")] = None,
    recipe: options.RecipeOption = None,
    steps: options.StepsOption = None,
    policy: options.PolicyOption = None,
    image_size: options.ImageSizeOption = None,
    labels: options.LabelsOption = None,
    baseline: Annotated[
        bool | None,
        typer.Option("--baseline/--no-baseline", help="Also train supervised-only on the same labels (default: for folders)."),
    ] = None,
    data_dir: options.DataDirOption = None,
    out: options.OutOption = Path("runs"),
    device: options.DeviceOption = "auto",
    precision: Annotated[str | None, typer.Option("--precision", help="fp32 (default), fp64, bf16 or fp16 (GPU).")] = None,
    compile: options.CompileOption = False,
    recompute: options.RecomputeOption = False,
    set_: options.SetOption = None,
    config: options.ConfigOption = None,
    resume: Annotated[
        Literal["auto", "never"], typer.Option("--resume", help="auto resumes an unfinished run; never refuses to.")
    ] = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write curves into RUN/tensorboard/.")] = False,
    json_: options.JsonOption = False,
) -> None:
    """Train a method on a setting or on your own pictures; run the same command again to resume, or to see the result again."""
    from crmatch.runs.workspace import Workspace
    from crmatch.training.execution import Execution

    named = {"plan.steps": steps, "augmentation.policy": policy, "data.image_size": image_size, "precision": precision}
    changes = options.read_changes(config, set_, {**named, "split": split, "seed": seed})
    specs = [options.make_spec(setting, method, recipe, data_dir, changes, labels)]
    if baseline is None:
        baseline = specs[0].data.folder is not None
    if baseline and method != "supervised":
        shared = {key: value for key, value in changes.items() if key != "method" and not key.startswith("method.")}
        specs.append(options.make_spec(setting, "supervised", recipe, data_dir, shared, labels))
    workspace, execution = Workspace.at(out, data_dir), Execution(device, compile, recompute)
    if is_main_process():
        _check_pictures(specs, workspace, execution, quiet=json_)
    from crmatch.cli.display import Display, print_records
    from crmatch.distributed.process_group import join
    from crmatch.runs.run import run

    records, stop = [], stop_request()
    processes = join()  # one, unless torchrun started several
    for spec in specs:
        with ExitStack() as stack:
            progress: Progress = stack.enter_context(Display(spec, quiet=json_ or not is_main_process()))
            if tensorboard and is_main_process():
                from crmatch.cli.tensorboard import EventFile

                progress = stack.enter_context(EventFile(workspace.run_directory(spec), beside=progress))
            record = run(spec, workspace, execution, resume=resume, progress=progress, stop=stop, processes=processes)
        records.append(record)
    if not is_main_process():
        return
    paths = [workspace.run_directory(spec).path for spec in specs]
    if json_:
        values = [
            {"run": str(path), "error": record.error, **record.model_dump(mode="json")}
            for record, path in zip(records, paths, strict=True)
        ]
        typer.echo(json.dumps({**values[0], "baseline": values[1] if len(values) > 1 else None}))
    else:
        print_records(records, paths)


def evaluate(run: options.RunArgument, data_dir: options.DataDirOption = None, json_: options.JsonOption = False) -> None:
    """Evaluate a finished run's model on its test set again."""
    from crmatch.analysis.finished_run import open_run
    from crmatch.cli.display import print_evaluation
    from crmatch.evaluation import measure

    finished = open_run(run, options.workspace_at(data_dir))
    test = finished.test
    quality = measure(finished.model.predict_probabilities(test.images), test.labels)
    if json_:
        typer.echo(json.dumps({"run": str(run), "test_images": len(test), **quality._asdict()}))
    else:
        print_evaluation(run, finished.record, quality, len(test))


def is_main_process() -> bool:
    """Whether this process has rank 0 and therefore prints."""
    return int(os.environ.get("RANK", "0")) == 0


def _check_pictures(specs: list[RunSpec], workspace: Workspace, execution: Execution, quiet: bool) -> None:
    """Decode a folder's pictures with a progress bar and print what was found, before anything heavy is imported."""
    spec = specs[0]
    if spec.data.folder is None:
        return
    from crmatch.cli.display import Bar
    from crmatch.data.folder.preflight import check_folder
    from crmatch.methods import METHODS
    from crmatch.runs.cost import describe_cost, estimate

    setting = workspace.setting_of(spec)
    with Bar("pictures", quiet) as progress:
        report = check_folder(Path(spec.data.folder), spec.data.image_size, workspace.data_dir, setting.labels_file, progress)
    if quiet:
        return
    lines = report.lines()
    if spec.augmentation.mirror:
        lines.append("Training mirrors pictures; for text or left/right classes add --set augmentation.mirror=false")
    lines += [
        f"{METHODS[one.method.name].title}: {describe_cost(estimate(one, setting, execution.activations))}" for one in specs
    ]
    typer.echo("\n".join(lines), err=True)
