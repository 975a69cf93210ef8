"""Command `crmatch table`: a table of the paper or of your own; its missing runs are trained or listed.

crmatch table ablation --setting digits@4 --splits 1-3    # on a small setting
crmatch table ablation --dry-run                          # what the paper's own table would cost
crmatch table --methods fixmatch,mine.py:X --settings digits@4,svhn_small@25 --splits 1-5    # a table of your own
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from crmatch.cli import options
from crmatch.errors import RequestError

if TYPE_CHECKING:
    from crmatch.engines.local import Engine
    from crmatch.paper.grid import Grid
    from crmatch.paper.results import FilledTable
    from crmatch.runs.workspace import Workspace
    from crmatch.spec.run_spec import RunSpec
    from crmatch.training.execution import Execution

Format = Literal["terminal", "markdown", "latex", "csv", "json"]


def table(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Which of the paper's, e.g. ablation; a wrong name lists them all.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option("--methods", help="A table of your own: its rows, e.g. fixmatch,fixmatch+ctaugment,mine.py:X.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option("--settings", help="A table of your own: its columns, e.g. svhn_small@25,digits@4.")
    ] = None,
    setting: Annotated[str | None, typer.Option("--setting", help="Another setting than the paper's, e.g. digits@4.")] = None,
    splits: Annotated[str | None, typer.Option("--splits", help="1-5, 2 or 1,3 (default: as in the paper, else 1).")] = None,
    recipe: options.RecipeOption = None,
    steps: options.StepsOption = None,
    set_: options.SetOption = None,
    out: options.OutOption = Path("runs"),
    data_dir: options.DataDirOption = None,
    device: options.DeviceOption = "auto",
    compile: options.CompileOption = False,
    recompute: options.RecomputeOption = False,
    engine: options.EngineOption = "local",
    jobs: options.JobsOption = None,
    ray_address: options.RayAddressOption = None,
    cpus_per_run: options.CpusPerRunOption = None,
    dry_run: options.DryRunOption = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set this table's runs aside and train all of them again.")] = False,
    unprinted: Annotated[
        bool, typer.Option("--unprinted", help="Add rows that the paper does not print, for its text and from its sources.")
    ] = False,
    records: options.RecordsOption = None,
    format_: Annotated[Format, typer.Option("--format", help="terminal, markdown, latex, csv or json.")] = "terminal",
    save: Annotated[Path | None, typer.Option("--save", help="Write the table to this file instead of showing it.")] = None,
) -> None:
    """Make a table, the paper's or your own: finished runs are reused, missing ones are trained; run it again to resume."""
    from crmatch.paper.grid import Overrides, find_table, make_grid, own_table, parse_splits
    from crmatch.paper.results import fill, finished_runs, recorded_runs, runs_in
    from crmatch.runs.workspace import Workspace
    from crmatch.training.execution import Execution

    if bool(methods) != bool(settings) or bool(name) == bool(methods) or (methods and (setting or unprinted)):
        asked = "give the NAME of a table of the paper, or --methods and --settings for a table of your own"
        raise RequestError(f"{asked}.\nFor example: crmatch table --methods fixmatch,crmatch --settings digits@4")
    if records and (dry_run or fresh):
        raise RequestError("--records trains nothing, so --dry-run and --fresh mean nothing with it.\nLeave one of them out.")
    if save and format_ == "terminal":
        raise RequestError(f"--save {save} needs a format for files.\nAdd --format markdown, latex, csv or json.")
    check_ray_options(engine, ray_address, cpus_per_run)
    workspace, execution = Workspace.at(out, data_dir), Execution(device, compile, recompute)
    chosen = [*workspace.options(), *execution.options()]
    changes = options.read_changes(None, set_, {})
    overrides = Overrides(setting, recipe, steps, parse_splits(splits) if splits else None, changes, unprinted)
    own = own_table(methods.split(","), settings.split(",")) if methods and settings else None
    found = functools.cache(lambda: recorded_runs(records) if records else finished_runs(workspace))
    grid = make_grid(own or find_table(name or ""), overrides, workspace, found)
    find = found().get if records else runs_in(workspace, grid)
    trainable = [] if records else [spec for spec in grid.specs if grid.is_trainable(spec)]
    missing = [spec for spec in trainable if fresh or find(spec) is None]
    problems: dict[RunSpec, str] = {}
    if dry_run:
        list_missing(grid, missing, chosen, execution, as_json=format_ == "json")
        return
    if missing:
        trainer = make_engine(engine, workspace, execution, jobs, ray_address, cpus_per_run)
        for spec in missing if fresh else []:
            workspace.run_directory(spec).set_aside()
        problems = train_missing(grid, missing, trainer, workspace)
    _show(fill(grid, find, options=chosen, problems=problems), format_, save)


def check_ray_options(engine: str, address: str | None, cpus: int | None) -> None:
    """Raise an error if there are options for Ray without Ray."""
    if engine != "ray" and (address or cpus):
        given = "--ray-address" if address else "--cpus-per-run"
        raise RequestError(f"{given} is for Ray clusters.\nAdd --engine ray, or leave it out.")


def make_engine(
    name: str, workspace: Workspace, execution: Execution, jobs: int | None, address: str | None, cpus: int | None
) -> Engine:
    """The engine that the options ask for."""
    if name == "ray":
        from crmatch.engines.ray import RayTasks, need_ray

        need_ray(address)  # before anything is printed or set aside
        return RayTasks(workspace, execution, address, jobs, cpus or 1)
    from crmatch.cli.display import Display
    from crmatch.engines.local import InProcess, WorkerProcesses

    return WorkerProcesses(workspace, execution, jobs) if jobs and jobs > 1 else InProcess(workspace, execution, Display)


def train_missing(
    grid: Grid,
    missing: Sequence[RunSpec],
    engine: Engine,
    workspace: Workspace,
    finished: Callable[[RunSpec], None] = lambda spec: None,
) -> dict[RunSpec, str]:
    """Train the missing runs and call `finished` after each; returns why some of them have no record."""
    from crmatch.engines.local import InProcess, RunOutcome
    from crmatch.engines.progress import TableProgress
    from crmatch.runs.signals import stop_request

    problems: dict[RunSpec, str] = {}
    with TableProgress(grid, missing, workspace, live=not isinstance(engine, InProcess)) as progress:

        def ended(run: RunOutcome) -> None:
            progress.ended(run)
            if run.problem:
                problems[run.spec] = run.problem
            else:
                finished(run.spec)

        engine.train_all(missing, ended, stop_request())
    return problems


def list_missing(
    grid: Grid, missing: Sequence[RunSpec], options: Sequence[str], execution: Execution, as_json: bool = False
) -> None:
    """Print the command of each missing run with its estimated cost."""
    from crmatch.runs.cost import describe_cost, estimate
    from crmatch.runs.directory import train_command

    runs = [
        (train_command(spec, setting, *options), estimate(spec, setting, execution.activations))
        for spec, setting in ((spec, grid.settings[spec.setting]) for spec in missing)
    ]
    if as_json:
        rows: list[dict[str, Any]] = [{"command": command, **cost._asdict()} for command, cost in runs]
        typer.echo(json.dumps({"title": grid.title, "runs": len(grid.specs), "missing": rows}))
        return
    typer.echo(f"{grid.title}\n{len(grid.specs)} runs, {len(grid.specs) - len(missing)} finished, {len(missing)} missing")
    for command, cost in runs:
        typer.echo(f"{command}\n    # {describe_cost(cost)}")
    known = [cost for _, cost in runs if cost.cpu_seconds is not None]
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
    elif save is None:
        typer.echo(FORMATS[format_](table), nl=False)
    else:
        write_file(save, FORMATS[format_](table).encode())
        typer.echo(f"Saved in {save}")
