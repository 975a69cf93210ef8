"""Command `crmatch runs`: a list of runs.

crmatch runs                                          # all runs in ./runs, the newest last
crmatch runs --setting digits@4 --method crmatch      # some of them
"""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crmatch.cli import options

if TYPE_CHECKING:
    from crmatch.data.settings import Setting
    from crmatch.spec.run_spec import RunSpec


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look (default: runs).")] = Path("runs"),
    setting: Annotated[str | None, typer.Option("--setting", help="Only runs on this setting or folder of pictures.")] = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="Only runs of this method.")] = None,
    changed: Annotated[
        str | None, typer.Option("--changed", help="Only runs whose differences from the recipe contain this text.")
    ] = None,
    below: Annotated[float | None, typer.Option("--below", help="Only runs with a test error below this, in percent.")] = None,
    since: Annotated[datetime | None, typer.Option("--since", help="Only runs that changed since this day.")] = None,
    data_dir: options.DataDirOption = None,
    json_: options.JsonOption = False,
) -> None:
    """List runs: setting, method, split, differences from the recipe, test error, date, directory; the newest last."""
    from crmatch.errors import CRMatchError, DataError, printable
    from crmatch.own_code import short_name
    from crmatch.runs.directory import RunDirectory, variant_parts

    if not folder.is_dir():
        raise DataError(f"there is no directory {folder}.\nTrain first, or name the directory of your runs.")
    workspace, settings, rows = options.workspace_at(data_dir), dict[object, "Setting | None"](), list[dict[str, Any]]()

    def setting_of(spec: RunSpec) -> Setting | None:
        """The setting, looked up once, because a folder of pictures takes a while; None if its data is not here."""
        key = (spec.setting, spec.data.folder, spec.data.labels_file, spec.data.code)
        if key not in settings:
            settings[key] = None
            with contextlib.suppress(CRMatchError):
                settings[key] = workspace.setting_of(spec)
        return settings[key]

    for directory in [RunDirectory(file.parent) for file in folder.rglob("spec.json")]:
        try:
            record = directory.read_record()
            spec = record.spec if record else directory.read_spec()
        except DataError as error:
            typer.echo(printable(str(error).splitlines()[0]), err=True)
            continue
        assert spec
        known = setting_of(spec)
        differences = variant_parts(spec, known) if known else [directory.path.parent.name.partition("-")[2]]
        date = datetime.fromtimestamp((directory.record if record else directory.spec).stat().st_mtime)
        error_rate = record.error if record else None
        row: dict[str, Any] = {
            "setting": spec.setting,
            "method": spec.method.name,
            "split": spec.split,
            "seed": spec.seed,
            "differences": ", ".join(differences),
            "error %": error_rate,
            "state": "finished" if record else "unfinished",
            "date": date.isoformat(" ", "seconds"),
            "run": str(directory.path),
        }
        wanted = (
            setting is None or spec.setting == short_name(setting.rstrip("/")),
            method is None or spec.method.name == short_name(method),
            changed is None or changed in row["differences"],
            below is None or (error_rate is not None and error_rate < below),
            since is None or date >= since,
        )
        if all(wanted):
            rows.append(row)
    rows.sort(key=lambda row: row["date"])
    if json_:
        options.print_rows(rows, as_json=True)
    elif rows:
        for row in rows:
            state, value = row.pop("state"), row["error %"]
            row["error %"] = "unfinished" if state == "unfinished" else "no test set" if value is None else f"{value:.2f}"
        options.print_rows(rows, as_json=False)
    else:
        typer.echo(f"There are no runs to list in {folder}.")
