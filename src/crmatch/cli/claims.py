"""Command `crmatch claims`: the claims of the paper, tested on a setting; missing runs are trained and analyzed, or listed.

crmatch claims main ablation --setting digits@4 --splits 1-5    # some topics
crmatch claims --setting svhn_small@25 --dry-run                # what all of them would train, and its cost
crmatch claims --records docs/results/records                   # from records alone
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crmatch.cli import options
from crmatch.cli.table import check_ray_options, list_missing, make_engine, train_missing
from crmatch.errors import DataError, RequestError

if TYPE_CHECKING:
    from crmatch.paper.claims import Plan
    from crmatch.paper.results import Find
    from crmatch.runs.workspace import Workspace


def claims(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="Only claims of these topics; a wrong one lists them all.")
    ] = None,
    setting: Annotated[str, typer.Option("--setting", help="DATASET@LABELS_PER_CLASS on which to test.")] = "digits@4",
    splits: Annotated[str, typer.Option("--splits", help="1-5, 2 or 1,3.")] = "1-5",
    recipe: options.RecipeOption = None,
    steps: options.StepsOption = None,
    set_: options.SetOption = None,
    out: options.OutOption = Path("runs"),
    data_dir: options.DataDirOption = None,
    device: options.DeviceOption = "auto",
    engine: options.EngineOption = "local",
    jobs: options.JobsOption = None,
    ray_address: options.RayAddressOption = None,
    cpus_per_run: options.CpusPerRunOption = None,
    dry_run: options.DryRunOption = False,
    records: options.RecordsOption = None,
    save: Annotated[
        Path, typer.Option("--save", help="Where to write the page, .md or .html; its picture is written beside it.")
    ] = Path("claims.md"),
) -> None:
    """Test the claims of the paper: train and analyze missing runs, then say for each claim whether it holds, and how sure."""
    from crmatch.paper.claims import make_plan
    from crmatch.paper.grid import Overrides, parse_splits
    from crmatch.paper.results import analysis_file, records_in, runs_in
    from crmatch.runs.workspace import Workspace
    from crmatch.training.execution import Execution

    if records and dry_run:
        raise RequestError("--records trains nothing, so --dry-run means nothing with it.\nLeave one of them out.")
    if save.suffix not in (".md", ".html"):
        raise RequestError(f"--save {save} has no known format.\nUse .md or .html.")
    check_ray_options(engine, ray_address, cpus_per_run)
    workspace, execution = Workspace.at(out, data_dir), Execution(device)
    overrides = Overrides(None, recipe, steps, parse_splits(splits), options.read_changes(None, set_, {}))
    plan = make_plan(topics or [], setting, overrides, workspace)
    find = records_in(records) if records else runs_in(workspace, plan.grid)
    missing = [] if records else [spec for spec in plan.grid.specs if find(spec) is None]

    def unanalyzed() -> list[tuple[str | None, str]]:
        """Run (None if it is not finished) and analysis."""
        found = [((run := find(spec)) and run.source, analysis) for spec, analysis in plan.analyses()]
        return [(source, analysis) for source, analysis in found if not (source and analysis_file(source, analysis).exists())]

    def analyze() -> None:
        for source, analysis in unanalyzed():
            if source:
                _analyze(source, analysis, workspace)

    if dry_run:
        list_missing(plan.grid, missing, [*workspace.options(), *execution.options()], execution)
        missing_analyses = f"{len(unanalyzed())} analyses of finished runs are missing (crmatch probe, crmatch distances)"
        typer.echo(f"{len(plan.claims)} claims; {missing_analyses}")
        return
    if not records:
        analyze()  # of runs that were finished before
    if missing:
        trainer = make_engine(engine, workspace, execution, jobs, ray_address, cpus_per_run)
        train_missing(plan.grid, missing, trainer, workspace, lambda spec: analyze())
    _show(plan, find, save, records or out)


def _show(plan: Plan, find: Find, save: Path, folder: Path) -> None:
    """Write the page and print its verdicts."""
    from crmatch.cli.display import print_table
    from crmatch.paper.verdicts import COLUMNS, evaluate_claims, rows_of
    from crmatch.report.claims_page import write_claims

    results = evaluate_claims(plan, find)
    if not results.sources:
        raise DataError(f"there are no finished runs for these claims in {folder}.\nLeave out --records to train them.")
    picture = write_claims([results], save, shlex.join(["crmatch", *sys.argv[1:]]))
    shown = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(results)]
    print_table([{key: row[key].replace("*", "") for key in COLUMNS if key != "95 % bootstrap"} for row in shown])
    typer.echo(f"{results.title}: {results.summary}\nSaved in {save} and {picture}")


def _analyze(run: str, analysis: str, workspace: Workspace) -> None:
    """Save the result of `crmatch probe` or `crmatch distances` in the directory of a run."""
    from crmatch.analysis.probe import probe
    from crmatch.analysis.similarities import similarities
    from crmatch.atomic_files import write_json
    from crmatch.paper.results import analysis_file

    typer.echo(f"crmatch {analysis} {run}", err=True)
    result = (probe if analysis == "probe" else similarities)(run, workspace)
    write_json(analysis_file(run, analysis), {"run": run, **{name: one._asdict() for name, one in result.items()}})
