"""The command line: `crmatch COMMAND ...`. Heavy imports happen inside the commands."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

import crmatch
from crmatch.cli.analyze import distances, figure, probe, report
from crmatch.cli.browser import label, serve
from crmatch.cli.claims import claims
from crmatch.cli.data import data
from crmatch.cli.help import arrange
from crmatch.cli.options import is_main_process
from crmatch.cli.runs import runs
from crmatch.cli.show import show
from crmatch.cli.table import table
from crmatch.cli.train import evaluate, train
from crmatch.cli.use import export, predict, review, suggest
from crmatch.errors import CRMatchError, LostProcessError, StoppedError, printable
from crmatch.runs.signals import catch_signals

app = typer.Typer(
    help="Train image classifiers from a handful of labels and a pile of unlabeled images.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"crmatch {crmatch.__version__}")
        raise typer.Exit


@app.callback()
def _options_of_the_program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


# The help lists the commands in this order.
for command in (
    train, evaluate, predict, export, label, review, suggest, serve, runs, table, claims, report, probe, distances,
):  # fmt: skip
    app.command()(command)
app.add_typer(figure, name="figure")
app.add_typer(show, name="show")
app.add_typer(data, name="data")


def main() -> None:
    """Run a command; expected failures print two lines and exit with their code."""
    stop = catch_signals(quiet=not is_main_process())
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("crmatch").setLevel(logging.INFO if is_main_process() else logging.CRITICAL)
    try:
        command = typer.main.get_command(app)
        arrange(command)
        command(standalone_mode=False)
        sys.stdout.flush()
    except CRMatchError as error:
        if is_main_process() or isinstance(error, LostProcessError):
            typer.echo("\n".join(map(printable, f"crmatch: {error}".split("\n"))), err=True)
        raise SystemExit(stop.exit_code if isinstance(error, StoppedError) else error.exit_code) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except typer.TyperException as error:
        message = getattr(error, "format_message", error.__str__)()
        if message:  # empty if the help was printed because there were no arguments
            typer.echo(f"crmatch: {message}\nSee crmatch --help.", err=True)
        raise SystemExit(2) from None
    except OSError as error:  # everything that is expected has a message of its own
        if isinstance(error, BrokenPipeError):  # the reader, for example head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
            raise SystemExit(1) from None
        place = f"{error.filename}: " if error.filename else ""
        typer.echo(f"crmatch: {printable(f'{place}{error.strerror or error}')}.\nCheck permissions and free space.", err=True)
        raise SystemExit(3) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        advice = "Use --recompute, smaller batches (plan.*_batch_size), images (--image-size) or networks (network.filters)."
        typer.echo(f"crmatch: this run does not fit into memory.\n{advice}", err=True)
        raise SystemExit(2) from None
