"""`crmatch table`: a table of the paper, its missing runs trained or listed, in any format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from crmatch.cli.options import DataDirOption, RecipeOption, RecomputeOption, SetOption, StepsOption, read_changes
from crmatch.errors import RequestError

if TYPE_CHECKING:
    from crmatch.engines.local import Engine, RunOptions
    from crmatch.paper.grid import Grid
    from crmatch.paper.results import FilledTable
    from crmatch.spec.run_spec import RunSpec

EngineName = Literal["local", "ray"]
Format = Literal["terminal", "markdown", "latex", "csv", "json"]


def table(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which table, e.g. ablation; a wrong name lists them all.")],
    setting: Annotated[str | None, typer.Option("--setting", help="Another setting than the paper's, e.g. digits@4.")] = None,
    splits: Annotated[str | None, typer.Option("--splits", help="1-5, 2 or 1,3 (default: as many as the paper).")] = None,
    recipe: RecipeOption = None,
    steps: StepsOption = None,
    set_: SetOption = None,
    out: Annotated[Path, typer.Option("--out", help="Where runs are kept.")] = Path("runs"),
    data_dir: DataDirOption = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    recompute: RecomputeOption = False,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="Where missing runs are trained: on this machine, or by a Ray cluster.")
    ] = "local",
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, max=256, help="Runs at once (default: 1; with Ray as many as the cluster has room for)."),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="HOST:PORT of a Ray cluster, or auto (default: one of this machine).")
    ] = None,
    cpus_per_run: Annotated[
        int | None, typer.Option("--cpus-per-run", min=1, max=1024, help="Cores of each run on a Ray cluster (default: 1).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing; list missing runs, their commands and an estimate of their cost.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set this table's runs aside and train all of them anew.")] = False,
    claims: Annotated[bool, typer.Option("--claims", help="Add rows for claims that the paper prints no rows for.")] = False,
    records: Annotated[
        Path | None, typer.Option("--records", help="Make the table from the records in this directory; train nothing.")
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="terminal, markdown, latex, csv or json.")] = "terminal",
    save: Annotated[Path | None, typer.Option("--save", help="Write the table to this file instead of showing it.")] = None,
) -> None:
    """Make a table of the paper: finished runs are reused, missing ones are trained; stopped, the same command continues."""
    from crmatch.engines.local import RunOptions
    from crmatch.paper.grid import Overrides, find_table, make_grid, parse_splits
    from crmatch.paper.results import fill, records_in, runs_in
    from crmatch.runs.workspace import Workspace

    _check_request(dry_run, fresh, records, format_, save)
    if engine != "ray" and (ray_address or cpus_per_run):
        given = "--ray-address" if ray_address else "--cpus-per-run"
        raise RequestError(f"{given} is for Ray clusters.\nAdd --engine ray, or leave it out.")
    changes = read_changes(None, set_, {})
    scale = Overrides(setting, recipe, steps, parse_splits(splits) if splits else None, changes, claims)
    workspace = Workspace.at(out, data_dir)
    grid = make_grid(find_table(name), scale, workspace)
    options = ["--out", str(out)] * (out != Path("runs")) + (["--data-dir", str(data_dir)] if data_dir else [])
    options += ["--recompute"] * recompute
    problems: dict[RunSpec, str] = {}
    find = records_in(records) if records else runs_in(workspace, grid)
    if records is None:
        missing = [spec for spec in grid.specs if fresh or find(spec) is None]
        if dry_run:
            _list_missing(grid, missing, options, recompute, format_)
            return
        if missing:
            store = RunOptions(out, data_dir, device, recompute)
            ready = _ray(store, ray_address, jobs, cpus_per_run) if engine == "ray" else _local(store, jobs or 1)
            problems = _train(grid, missing, ready, out, fresh)
    _show(fill(grid, find, options=options, problems=problems), format_, save)


def _check_request(dry_run: bool, fresh: bool, records: Path | None, format_: Format, save: Path | None) -> None:
    if records and (dry_run or fresh):
        raise RequestError("--records trains nothing, so --dry-run and --fresh mean nothing with it.\nLeave one of them out.")
    if save and format_ == "terminal":
        raise RequestError(f"--save {save} needs a format for files.\nAdd --format markdown, latex, csv or json.")


def _train(grid: Grid, missing: list[RunSpec], engine: Engine, out: Path, fresh: bool) -> dict[RunSpec, str]:
    """Train what is missing; returns why runs have no record."""
    from crmatch.engines.local import InProcess, RunOutcome, set_aside
    from crmatch.engines.progress import TableProgress
    from crmatch.runs.directory import run_directory
    from crmatch.runs.signals import stop_request

    if fresh:
        for spec in missing:
            set_aside(run_directory(out, spec, grid.settings[spec.setting]))
    problems: dict[RunSpec, str] = {}
    progress = TableProgress(grid, missing, out, live=not isinstance(engine, InProcess))

    def ended(run: RunOutcome) -> None:
        if run.problem:
            problems[run.spec] = run.problem
        progress.ended(run)

    with progress:
        engine.train_all(missing, ended, stop_request())
    return problems


def _ray(store: RunOptions, address: str | None, jobs: int | None, cpus: int | None) -> Engine:
    from crmatch.engines.ray import RayTasks, need_ray

    need_ray(address)  # before anything is said or set aside
    return RayTasks(store, address, jobs, cpus or 1)


def _local(store: RunOptions, jobs: int) -> Engine:
    from crmatch.cli.display import Display
    from crmatch.engines.local import InProcess, WorkerProcesses

    return InProcess(store, Display) if jobs == 1 else WorkerProcesses(store, jobs)


def _list_missing(grid: Grid, missing: list[RunSpec], options: list[str], recompute: bool, format_: Format) -> None:
    """What `--dry-run` says: the commands of all missing runs, each with what it will cost."""
    from crmatch.runs.cost import describe_cost, estimate
    from crmatch.spec.recipes import train_command

    costs = [estimate(spec, grid.settings[spec.setting], recompute) for spec in missing]
    commands = [train_command(spec, grid.settings[spec.setting], *options) for spec in missing]
    if format_ == "json":
        runs: list[dict[str, Any]] = [
            {"command": command, **cost._asdict()} for command, cost in zip(commands, costs, strict=True)
        ]
        typer.echo(json.dumps({"title": grid.title, "runs": len(grid.specs), "missing": runs}))
        return
    typer.echo(grid.title)
    typer.echo(f"{len(grid.specs)} runs, {len(grid.specs) - len(missing)} finished, {len(missing)} missing")
    for command, cost in zip(commands, costs, strict=True):
        typer.echo(f"{command}\n    # {describe_cost(cost)}")
    known = [cost for cost in costs if cost.steps is not None]
    if known:
        total = known[0]._replace(
            cpu_seconds=sum(cost.cpu_seconds or 0 for cost in known),
            gpu_seconds=sum(cost.gpu_seconds or 0 for cost in known),
            memory_bytes=max(cost.memory_bytes for cost in known),
        )
        typer.echo(f"all of them: {describe_cost(total, lengths=False)}")


def _show(table: FilledTable, format_: Format, save: Path | None) -> None:
    from crmatch.atomic_files import write_file
    from crmatch.paper.formats import FORMATS, to_terminal

    if format_ == "terminal":
        from crmatch.cli.display import print_wide

        print_wide(to_terminal(table))
        return
    text = FORMATS[format_](table)
    if save is None:
        typer.echo(text, nl=False)
    else:
        write_file(save, text.encode())
        typer.echo(f"The table is in {save}")
