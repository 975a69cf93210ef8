"""Commands `crmatch train` and `crmatch evaluate`.

crmatch train digits@4                       # CR-Match with four labels per class, a minute on a CPU
crmatch train my-photos/ --image-size 64     # your own pictures, with a supervised-only baseline
crmatch evaluate runs/digits@4/crmatch/split1-seed0
"""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from crmatch.cli import options
from crmatch.cli.options import is_main_process
from crmatch.errors import DataError, RequestError

if TYPE_CHECKING:
    from crmatch.data.folder.preflight import Preflight
    from crmatch.data.settings import Setting
    from crmatch.runs.cross_validation import Evidence
    from crmatch.runs.image_size import SizeChoice
    from crmatch.runs.record import RunRecord
    from crmatch.runs.workspace import Workspace
    from crmatch.spec.run_spec import RunSpec
    from crmatch.training.execution import Execution


def train(
    setting: options.SettingArgument,
    method: options.MethodOption = "crmatch",
    split: Annotated[int | None, typer.Option("--split", help="Which of the fixed splits, 1 (default) to 5.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of everything but the split (default 0).")] = None,
    recipe: options.RecipeOption = None,
    backbone: options.BackboneOption = None,
    minutes: options.MinutesOption = None,
    steps: options.StepsOption = None,
    policy: options.PolicyOption = None,
    network: options.NetworkOption = None,
    image_size: options.ImageSizeOption = None,
    labels: options.LabelsOption = None,
    from_: options.FromOption = None,
    baseline: Annotated[
        bool | None,
        typer.Option("--baseline/--no-baseline", help="Also train supervised-only on the same labels (default: for folders)."),
    ] = None,
    data_dir: options.DataDirOption = None,
    out: options.OutOption = Path("runs"),
    name: options.NameOption = None,
    device: options.DeviceOption = "auto",
    precision: Annotated[str | None, typer.Option("--precision", help="fp32 (default), fp64, bf16 or fp16 (GPU).")] = None,
    compile: options.CompileOption = False,
    recompute: options.RecomputeOption = False,
    set_: options.SetOption = None,
    config: options.ConfigOption = None,
    resume: Annotated[
        Literal["auto", "never"], typer.Option("--resume", help="auto resumes an unfinished run; never refuses to.")
    ] = "auto",
    tracker: Annotated[
        list[str] | None,
        typer.Option("--tracker", metavar="NAME", help="Also write curves for tensorboard, mlflow or wandb; repeatable."),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Short for --tracker tensorboard.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start even if the estimated time is more than a day.")] = False,
    json_: options.JsonOption = False,
) -> None:
    """Train a method on a setting or on your own pictures; run the same command again to resume, or to see the result again."""
    from crmatch.runs.directory import RunDirectory, keys_to_keep, method_reference
    from crmatch.runs.workspace import Workspace
    from crmatch.spec.recipes import quick_image_size, quick_start_size
    from crmatch.spec.run_spec import replace
    from crmatch.training.execution import Execution

    named = {"plan.steps": steps, "augmentation.policy": policy, "data.image_size": image_size, "precision": precision}
    changes = options.read_changes(config, set_, {"network": network, **named, "split": split, "seed": seed})
    started = time.monotonic()
    workspace, execution = Workspace.at(out, data_dir), Execution(device, compile, recompute)
    long_is_wanted = yes or minutes is not None or recipe in ("paper", "usb", "original")
    before = None
    if from_ is not None:
        before = _previous(from_, setting, method, recipe, backbone)
        labels = labels or (Path(before.spec.data.labels_file) if before.spec.data.labels_file else None)
        method = method_reference(before.spec) if method == "crmatch" else method
        recipe, backbone = before.spec.recipe, getattr(before.spec.network, "backbone", None)
        kept = keys_to_keep(before.spec, workspace.setting(setting, labels))
        kept["plan.start_size"] = before.spec.plan.start_size
        if image_size is not None:
            del kept["plan.start_size"]  # it follows from the size that is given now
        changes = kept | changes
    elif network and backbone is None:
        backbone = "none"
    parsed = workspace.setting(setting, labels)
    if parsed.folder and "RANK" not in os.environ:
        _hold_out(parsed, workspace)
    recipe = _choose_recipe(parsed, method, recipe, backbone, minutes)
    backbone = None if backbone == "none" else backbone
    if recipe == "quick" and minutes:
        changes.setdefault("data.image_size", quick_image_size(parsed, minutes))  # a given size stays
    specs = [options.make_spec(setting, method, recipe, data_dir, changes, labels, backbone)]
    if baseline is None:
        baseline = specs[0].data.folder is not None
    if baseline and method != "supervised":
        stage, own = ("head", ("method", "plan")) if recipe == "tune" else (recipe, ("method",))
        shared = {key: value for key, value in changes.items() if key.partition(".")[0] not in own}
        if recipe == "tune":
            shared.pop("network", None)  # the whole network of the round before
        specs.append(options.make_spec(setting, "supervised", stage, data_dir, shared, labels, backbone))
    if recipe == "quick" and minutes and "plan.start_size" not in changes:
        specs = [replace(spec, **{"plan.start_size": quick_start_size(spec, minutes)}) for spec in specs]
    workspaces = [workspace.named(name), workspace]  # the baseline keeps its own name
    pretrained = recipe in ("head", "tune")
    quiet, reason = json_ or not is_main_process(), ""
    if pretrained and "data.image_size" not in changes:
        if before:
            size, reason = before.spec.data.image_size, " (as in the round before)"
        else:
            choice = choose_size(specs[0], workspaces[0], minutes)
            size, reason = choice.size, choice.reason
        specs = [replace(spec, **{"data.image_size": size, "network.size_chosen": spec.recipe == recipe}) for spec in specs]
        if parsed.folder is None and not quiet:
            typer.echo(f"Images are used at {size} px{reason}. Choose another size with --image-size.", err=True)
    if from_ is not None and recipe != "head":  # a classifier on frozen features is trained in seconds
        specs[0] = replace(specs[0], start_from=f"{from_.resolve()}#{RunDirectory(from_).model_checksum()[:8]}")
    if not long_is_wanted:
        _refuse_long_run(specs[0], workspace, execution)
    if parsed.folder and is_main_process():
        report, used = check_pictures(specs[0], workspace, reason, quiet, minutes)
        if not quiet:
            lines = report.lines() if report.is_new(workspace.data_dir) else report.short_lines()
            typer.echo("\n".join([*lines, used]), err=True)
    from crmatch.cli.display import print_records
    from crmatch.cli.session import Session
    from crmatch.distributed.process_group import join

    tools = dict.fromkeys([*(tracker or []), *(["tensorboard"] if tensorboard else [])])
    session = Session(execution, resume, list(tools), not json_, join(), started)
    evidence: Evidence | None = None
    if pretrained and len(specs) > 1:
        from crmatch.runs.cross_validation import compare
        from crmatch.spec.recipes import head_of

        # The heads take seconds, and cross-validation tells which of them is better: they come before any tuning.
        base = session.train(specs[1], workspace)
        if recipe == "head":
            main = head = session.train(specs[0], workspaces[0], minutes)
        else:  # the head of a tuned run keeps its own name
            head = session.train(head_of(specs[0], workspace.setting_of(specs[0])), workspace)
        evidence = compare(base[1], head[1])
        if evidence and session.speaks:
            typer.echo("\n".join(evidence.lines()), err=True)
        trained = [main if recipe == "head" else session.train(specs[0], workspaces[0], minutes), base]
    else:
        # The baseline comes first, so that `latest` is the run that was asked for. They share the time.
        trained = [
            session.train(spec, place, minutes, share=1 / (number + 1))
            for number, (spec, place) in reversed(list(enumerate(zip(specs, workspaces, strict=False))))
        ][::-1]
    if not is_main_process():
        return
    ordered = [record for _, record in trained]
    paths = [path for path, _ in trained]
    if json_:
        values = [
            {"run": str(path), "error": record.error, **record.model_dump(mode="json")}
            for record, path in zip(ordered, paths, strict=True)
        ]
        found = evidence._asdict() if evidence else None
        others = {"baseline": values[1] if len(values) > 1 else None, "evidence": found}
        if before:
            others["before"] = {"run": str(from_), "error": before.error, **before.model_dump(mode="json")}
        typer.echo(json.dumps({**values[0], **others}))
    else:
        print_records(ordered, paths, before)
        best = paths[0]
        if evidence and recipe == "head":
            best = paths[0 if evidence.unlabeled_help else 1]
            typer.echo(f"Recommended: {best}")
        run = shlex.quote(str(best))
        label = f", crmatch label {run} to label more pictures, crmatch predict {run} PICTURES..." if parsed.folder else ""
        mistakes = " to see its mistakes" if ordered[0].error is not None else ""
        typer.echo(f"Next: crmatch report {run}{mistakes}{label}")


def evaluate(
    run: options.RunArgument,
    data_dir: options.DataDirOption = None,
    code: options.CodeOption = None,
    json_: options.JsonOption = False,
) -> None:
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
        print_evaluation(run, finished.record, quality, finished.model.calibration)


def _previous(run: Path, setting: str, method: str, recipe: str | None, backbone: str | None) -> RunRecord:
    """The record of the round before, which must have been trained on the same data and in the same way."""
    from crmatch.methods.base import StoredMethod
    from crmatch.own_code import short_name
    from crmatch.runs.finished import read_record

    record = read_record(run)
    spec = record.spec
    if spec.setting not in (setting, short_name(setting), Path(setting).resolve().name):
        raise RequestError(f"{run} was trained on {spec.setting}, not on {setting}.\nName its folder, or leave out --from.")
    asked = {"method": (short_name(method), spec.method.name), "recipe": (recipe, spec.recipe)}
    asked["backbone"] = backbone, getattr(spec.network, "backbone", "none")
    for option, (value, there) in asked.items():
        if value not in (None, there) and (option, value) != ("method", "crmatch"):
            raise RequestError(f"{run} was trained with {option} {there}, not {value}.\nLeave out --{option} or --from.")
    if isinstance(spec.method, StoredMethod) and method == "crmatch":  # a record must not name the file that is imported
        raise spec.method.not_here()
    return record


def _choose_recipe(setting: Setting, method: str, recipe: str | None, backbone: str | None, minutes: float | None) -> str:
    """The recipe that was asked for, or the one that fits: with a pretrained backbone `head`, or `tune` if there is time."""
    from crmatch.spec.recipes import default_recipe, unnamed_recipe

    if recipe in ("head", "tune") and backbone == "none":
        raise RequestError(
            f"recipe {recipe} needs a pretrained network, and --backbone none was given.\nLeave out one of the two."
        )
    if recipe is None and backbone == "none":
        recipe = unnamed_recipe(setting)
    if recipe is None:
        recipe = "head" if backbone else default_recipe(setting, method)
        recipe = "tune" if recipe == "head" and minutes else recipe
    if backbone not in (None, "none") and recipe not in ("head", "tune"):
        raise RequestError(f"--backbone {backbone} needs recipe head or tune, not {recipe}.\nLeave out one of the two.")
    return recipe


def _hold_out(setting: Setting, workspace: Workspace) -> None:
    """Hold out a test set in a folder that has none, unless it was trained on before, and say so."""
    from crmatch.data.folder.hold_out import hold_out
    from crmatch.data.folder.scan import HELD_OUT_FILE

    assert setting.folder is not None
    if any((workspace.out / setting.name).glob("*/*/spec.json")):  # earlier runs had no test set, or this one
        return
    try:
        if count := hold_out(setting.folder, setting.labels_file):
            what = f"There is no test set: {count:,} labeled pictures, a fifth of each class, are held out to measure the error"
            advice = "Keep only the first line of that file to train with all labels."
            typer.echo(f"{what}. They are listed in {setting.folder / HELD_OUT_FILE}.\n{advice}", err=True)
    except DataError as error:
        typer.echo(f"There is no test set, and none is held out: {str(error).splitlines()[0]}", err=True)


def choose_size(spec: RunSpec, workspace: Workspace, minutes: float | None = None) -> SizeChoice:
    """The image size of a run with a pretrained backbone: one at which it takes three minutes, or most of `minutes`."""
    from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE
    from crmatch.runs.image_size import SizeChoice, choose_image_size
    from crmatch.spec.run_spec import replace

    spec = replace(spec, **{"network.size_chosen": True, "plan.minutes": minutes})
    if (begun := workspace.run_directory(spec).read_spec()) is not None:
        return SizeChoice(begun.data.image_size, {})
    if getattr(spec.network, "backbone", None) not in EFFICIENTNET_LITE:  # the time of other networks is not known
        return SizeChoice(spec.data.image_size, {})
    return choose_image_size(spec, workspace.setting_of(spec), workspace, 0.9 * 60 * minutes if minutes else 180)


def _refuse_long_run(spec: RunSpec, workspace: Workspace, execution: Execution) -> None:
    """Stop before more than a day of training, unless it was begun before, and name what takes minutes."""
    from crmatch.data.official.fetch import require_set
    from crmatch.methods import title_of
    from crmatch.runs.cost import DAY, describe_cost, duration, estimate

    setting = workspace.setting_of(spec)
    cost = estimate(spec, setting, execution.activations)
    if (cost.cpu_seconds or 0) <= DAY or spec.recipe == "head" or workspace.run_directory(spec).spec.exists():
        return
    if execution.device != "cpu" and (cost.gpu_seconds or 0) <= DAY:
        from crmatch.training.runtime import choose_runtime

        if choose_runtime(execution, spec.precision).device.type == "cuda":
            return
    if spec.data.folder is None:
        require_set(setting.data, workspace.data_dir)
    advice = "Use --minutes 10 or a smaller --image-size, or add --yes to train it all the same."
    if spec.recipe == "paper":
        quick = estimate(options.make_spec(setting.name, spec.method.name, "quick", workspace.data_dir, {}), setting)
        advice = (
            f"Use --recipe quick (about {duration(quick.cpu_seconds or 0)}; with --minutes 10 it gets better), "
            "or add --recipe paper to train it all the same."
        )
    run = f"{title_of(spec.method)} on {spec.setting}, recipe {spec.recipe}"
    raise RequestError(f"{run}, would take long: {describe_cost(cost)}.\n{advice}")


def check_pictures(
    spec: RunSpec, workspace: Workspace, reason: str, quiet: bool, minutes: float | None = None
) -> tuple[Preflight, str]:
    """Decode a folder's pictures with a progress bar: the report, and a line about their size in training and its cost.

    `reason`, in parentheses, tells why this size was chosen.
    """
    from crmatch.cli.display import Bar
    from crmatch.data.folder.preflight import check_folder
    from crmatch.runs.cost import describe_size

    setting, size = workspace.setting_of(spec), spec.data.image_size
    was_given = not getattr(spec.network, "size_chosen", False)  # no advice against a size that was chosen for the user
    assert setting.folder is not None
    with Bar("pictures", quiet) as progress:
        report = check_folder(setting.folder, size, workspace.data_dir, setting.labels_file, progress, advise_size=was_given)
    line = describe_size(spec, setting, sum(one.labeled for one in report.classes) + report.unlabeled, reason, minutes)
    if spec.augmentation.mirror:
        line += " It mirrors pictures; for text or left/right classes add --set augmentation.mirror=false"
    return report, line
