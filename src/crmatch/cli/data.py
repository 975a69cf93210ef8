"""`crmatch data`: list, fetch and check data sets and folders of pictures, and write their fixed splits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from crmatch.cli.options import (
    DataDirOption,
    JsonOption,
    LabelsOption,
    SettingArgument,
    make_spec,
    print_rows,
    workspace_at,
)
from crmatch.errors import DataError, RequestError

data = typer.Typer(help="Data sets and folders: list, fetch, check, split, import labels, clean up.", no_args_is_help=True)


@data.command("list")
def list_data(data_dir: DataDirOption = None, json_: JsonOption = False) -> None:
    """List the data sets that are here or can be fetched, with size and origin."""
    from crmatch.data.official.fetch import inventory

    rows = [
        {
            "data set": row.name,
            "here": "yes" if row.here else "no",
            "size": "?" if row.size is None else f"{row.size / 1e6:,.0f} MB",
            "images": ", ".join(f"{name} {count:,}" for name, count in (row.counts or {}).items()),
            "origin": row.origin,
        }
        for row in inventory(workspace_at(data_dir).data_dir)
    ]
    print_rows(rows, json_)


@data.command("fetch")
def fetch_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="cifar10, cifar100, svhn, stl10 or mini_imagenet.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Official file, or directory that holds it, instead of a download.")
    ] = None,
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Download a data set, or read it from --from, verify and pack it; run again after an interruption to resume."""
    from crmatch.cli.display import Bar
    from crmatch.data.official.fetch import fetch
    from crmatch.data.settings import ALIASES

    with Bar("bytes", quiet=json_) as progress:
        path = fetch(ALIASES.get(name, name), workspace_at(data_dir).data_dir, source=source, progress=progress)
    typer.echo(json.dumps({"packed": str(path)}) if json_ else f"{name} is ready: {path}")


@data.command("check")
def check_data(
    name: Annotated[str, typer.Argument(metavar="NAME|FOLDER", help="A data set, or a folder of pictures.")],
    labels: LabelsOption = None,
    image_size: Annotated[int | None, typer.Option("--image-size", help="Side of the images, for a folder.")] = None,
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Verify hashes and counts of a data set, or report what is in a folder of pictures and how it will be used."""
    from crmatch.cli.display import Bar
    from crmatch.data.settings import ALIASES

    workspace = workspace_at(data_dir)
    if Path(name).is_dir():
        from crmatch.cli.train import check_pictures, choose_size
        from crmatch.spec.run_spec import replace

        chosen, reason = {"data.image_size": image_size} if image_size else {}, ""
        spec = make_spec(str(Path(name).resolve()), "crmatch", None, data_dir, chosen, labels)  # as crmatch train makes it
        if spec.recipe == "head" and image_size is None:
            choice = choose_size(spec, workspace)
            spec, reason = replace(spec, **{"data.image_size": choice.size, "network.size_chosen": True}), choice.reason
        report, used = check_pictures(spec, workspace, reason, quiet=json_)
        report.is_new(workspace.data_dir)  # crmatch train need not repeat it
        typer.echo(json.dumps(asdict(report)) if json_ else "\n".join([*report.lines(), used]))
        return
    from crmatch.data.official.fetch import check

    with Bar("bytes", quiet=json_) as progress:
        found = check(ALIASES.get(name, name), workspace.data_dir, progress=progress)
    if json_:
        typer.echo(json.dumps({**found._asdict(), "path": str(found.path), "ok": not found.problems}))
    else:
        counts = ", ".join(f"{count:,} {part}" for part, count in found.counts.items())
        typer.echo(f"{found.path}: {counts}; {len(found.class_names)} classes; {found.origin}; sha256 {found.sha256}")
    if found.problems:
        raise DataError(f"{found.path} is not as it should be: {found.problems[0]}.\nFetch it again: crmatch data fetch {name}")


@data.command("split")
def split_data(
    setting: SettingArgument,
    out: Annotated[Path, typer.Option("--out", help="Where to write the five files.")] = Path("splits"),
    rule: Annotated[str | None, typer.Option("--rule", help="balanced, proportional or folds (default: the set's).")] = None,
    data_dir: DataDirOption = None,
    json_: JsonOption = False,
) -> None:
    """Write the five fixed splits of a setting as JSON index lists, unless they exist, and show them."""
    from crmatch.data.settings import SPLITS
    from crmatch.spec.recipes import recipe
    from crmatch.spec.run_spec import replace

    workspace = workspace_at(data_dir)
    parsed = workspace.setting(setting)
    if parsed.folder:
        raise RequestError(f"{setting} is a folder, whose labels are its own.\nName a data set, for example digits@4.")
    spec = replace(recipe(parsed), **({"data.split_rule": rule} if rule else {}))
    from crmatch.data.load import load_data
    from crmatch.data.splits import describe_split, keep_split, make_split

    loaded = load_data(parsed.data, workspace.data_dir)
    rows = []
    for number in range(1, SPLITS + 1):
        split = make_split(loaded, parsed.labels_per_class, number, spec.data.split_rule, spec.data.unlabeled)
        description = describe_split(split, loaded.train, parsed.name, number, spec.data.split_rule)
        path = out / parsed.name / f"split{number}.json"
        keep_split(path, description)
        counts = " ".join(str(count) for count in description["labels_of_class"])
        rows.append({"split": number, "labels of each class": counts, "unlabeled": len(split.unlabeled), "file": str(path)})
    print_rows(rows, json_)


@data.command("import")
def import_labels(
    export: Annotated[Path, typer.Argument(metavar="EXPORT", help="Label Studio's JSON or CSV, CVAT's XML, or another table.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the pictures.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write or change (default: labels.csv in FOLDER).")] = None,
    json_: JsonOption = False,
) -> None:
    """Write labels.csv from an export of Label Studio or CVAT; lines of other pictures in it stay."""
    from crmatch.data.folder.importers import read_export
    from crmatch.data.folder.labels_file import change_labels
    from crmatch.data.folder.scan import LABELS_FILE, join_names

    target = out or folder / LABELS_FILE
    if not folder.is_dir():
        raise RequestError(f"there is no folder {folder}.\nName the folder of the pictures.")
    labels, missing, unclear = read_export(export, folder)
    if not labels:
        names = join_names(missing or unclear, 3) or "none"
        raise DataError(f"{export} has no label for a picture in {folder} (its pictures: {names}).\nName the right folder.")
    change_labels(target, folder, labels)
    if json_:
        typer.echo(json.dumps({"file": str(target), "labels": len(labels), "missing": missing, "unclear": unclear}))
        return
    typer.echo(f"{len(labels):,} labels of {len({*labels.values()})} classes: {target}")
    for left_out, reason in ((missing, "not found in the folder"), (unclear, "no label, or several")):
        if left_out:
            typer.echo(f"{len(left_out):,} left out, {reason}: {join_names(left_out)}", err=True)


@data.command("clean")
def clean_data(
    data_dir: DataDirOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove decoded pictures and stored features; they are computed again when they are needed."""
    from crmatch.data.folder.cache import remove_unused

    workspace = workspace_at(data_dir)
    for what, place in (("decoded pictures", workspace.data_dir / "folders"), ("stored features", workspace.features)):
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        if not dry_run:
            remove_unused(place, most=-1)
        typer.echo(f"{what}: {size / 1e6:,.0f} MB {'in' if dry_run else 'removed from'} {place}")
