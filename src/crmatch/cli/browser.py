"""Commands with a page in the browser: `crmatch label` and `crmatch serve`.

crmatch label runs/my-photos/round1     # the suggested pictures first; every choice is written to labels.csv
crmatch serve runs/my-photos/round2     # drop a picture, see its classes
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crmatch.cli.options import CodeOption, DataDirOption, RunArgument, next_round, short_path, workspace_at
from crmatch.errors import InUseError, RequestError, printable

if TYPE_CHECKING:
    from crmatch.report.server import LocalServer

PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on this computer (default: any free one).")]
BrowserOption = Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")]
IdleOption = Annotated[float, typer.Option("--idle", min=0.01, help="Stop after so many minutes without a request.")]


def label(
    place: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help="A finished run on a folder of pictures, or the folder.")],
    port: PortOption = 0,
    browser: BrowserOption = True,
    idle: IdleOption = 30,
    train_next: Annotated[bool, typer.Option("--train", help="Train the next round when you press done.")] = False,
    out: Annotated[Path, typer.Option("--out", help="Where the runs of a FOLDER are kept.")] = Path("runs"),
    data_dir: DataDirOption = None,
    code: CodeOption = None,
) -> None:
    """Label pictures in the browser, those first whose labels would help most; choices are written to labels.csv at once."""
    from filelock import FileLock, Timeout

    from crmatch.atomic_files import checksum, remove_leftovers
    from crmatch.cli.display import Bar
    from crmatch.cli.train import train
    from crmatch.predict.label_suggestions import labels_file, read_run
    from crmatch.report.labeling import LabelingSite, read_folder
    from crmatch.report.server import LocalServer
    from crmatch.runs.finished import read_record

    workspace = workspace_at(data_dir)
    run, folder = _find(place, out)
    out = run.parents[2] if run else out
    spec = read_record(run).spec if run else None
    file = (spec and labels_file(spec)) or folder / "labels.csv"
    name = _next_name(out / folder.name, run)
    words = ["--name", name] if name else []
    words += ["--out", short_path(out)] if out.resolve() != Path("runs").resolve() else []
    words += ["--data-dir", str(data_dir)] if data_dir else []
    workspace.data_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(workspace.data_dir / f"labeling-{checksum(str(file).encode())}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InUseError(f"another crmatch label is writing {file}.\nUse its page, or stop it first.") from error
    with Bar("pictures") as progress:
        pictures = read_folder(folder, file, workspace.data_dir, spec.data.image_size if spec else None, progress)
    remove_leftovers(file.parent, file.name)  # of a server that was killed
    labels = pictures.train.labels
    reviewed = None
    if run and (labels == -1).any() and (labels >= 0).any():
        with Bar("views", label="predicting") as progress:
            reviewed = read_run(run, workspace, progress)
    site = LabelingSite(folder, file, pictures, reviewed, next_round(str(folder), run, *words))
    ended = _serve(LocalServer(site, port), browser, idle, f"Every choice is written to {file}.")
    site.close()
    typer.echo(printable(f"{site.summary()}: {file}" if site.changed else site.summary()))
    if train_next and ended and site.changed:
        lock.release()
        train(str(folder), from_=run, name=name, out=out, data_dir=data_dir)
    else:
        typer.echo(printable(f"Next: {site.next_command}"))


def serve(
    run: RunArgument,
    port: PortOption = 0,
    browser: BrowserOption = True,
    idle: IdleOption = 30,
    code: CodeOption = None,
) -> None:
    """Try a model in the browser: drop a picture, see its classes. Programs get JSON from the same address."""
    from crmatch.predict.model import load
    from crmatch.report.model_site import ModelSite
    from crmatch.report.server import LocalServer

    model = load(run)
    server = LocalServer(ModelSite(model, str(model.config["setting"])), port)
    _serve(server, browser, idle, f"For programs: curl --data-binary @photo.jpg {server.address}predict")


def _serve(server: LocalServer, browser: bool, idle: float, hint: str) -> bool:
    """Serve until Ctrl-C, the page's last request, or `idle` minutes without one; returns whether the page ended it."""
    from crmatch.runs.signals import stop_request

    stop = stop_request()
    stop.quiet = True
    stop()  # from now on, Ctrl-C ends the loop below instead of the process
    typer.echo(f"{server.address}\n{printable(hint)}\nCtrl-C stops the server.")
    if browser and (sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(server.address)
    server.run(stop, 60 * idle)
    stop.quiet = False
    if not (server.ended or stop()):
        typer.echo(f"Stopped after {idle:g} minutes without a request.")
    return server.ended


def _find(place: Path, out: Path) -> tuple[Path | None, Path]:
    """The run and its folder of pictures; for a folder its newest run in `out`, or None if there is none."""
    from crmatch.runs.directory import RunDirectory
    from crmatch.runs.finished import find_run, finished_below, read_record

    is_folder = any((place / part).exists() for part in ("labeled", "unlabeled", "labels.csv"))
    if place.is_dir() and (is_folder or not finished_below(place, "**/record.json")):
        folder = Path(os.path.abspath(place))
        runs = {run: read_record(run).spec for run in finished_below(out / folder.name, "**/record.json")}
        mine = [run for run, spec in runs.items() if spec.data.folder == str(folder) and spec.method.name != "supervised"]
        return max(mine, key=lambda run: RunDirectory(run).record.stat().st_mtime, default=None), folder
    run = find_run(place)
    named = read_record(run).spec.data.folder
    if named is None:
        raise RequestError(f"{run} was not trained on a folder of pictures.\nFor a data set: crmatch review {run}")
    return run, Path(named)


def _next_name(runs: Path, run: Path | None) -> str | None:
    """The first free name after that of `run`, as round2 after round1; None if it has no name of its own."""
    found = re.fullmatch(r"([^=]*?)(\d+)", run.parent.name if run else "round0")
    free = (f"{found[1]}{number}" for number in itertools.count(int(found[2]) + 1)) if found else ()
    return next((name for name in free if not (runs / name).exists()), None)
