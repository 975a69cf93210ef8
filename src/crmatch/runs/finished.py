"""Finding finished runs and reading their records. Imports no torch, and no code that a record names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crmatch.errors import DataError, RequestError
from crmatch.runs.directory import RunDirectory
from crmatch.runs.record import RunRecord

LATEST = "latest"


def records(folder: Path | str = "runs") -> dict[Path, RunRecord]:
    """The records of all finished runs at or below `folder` by their directories, the oldest first."""
    found = sorted(finished_below(Path(folder), "**/record.json"), key=_finished_at)
    return {run: read_record(run) for run in found}


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Directories of the finished runs at or below each of `paths`, in order and without duplicates.

    `latest` is the newest run in `runs`, and `folder/latest` the newest in that folder. Runs that `--fresh` set aside are found
    only if they are named themselves.
    """
    found: dict[Path, None] = {}
    for path in paths:
        newest = path.name == LATEST and not path.exists()
        folder = (path.parent if path.parent != Path() else Path("runs")) if newest else path
        if not folder.is_dir():
            raise DataError(f"there is no directory {folder}.\nName the directory of a run; crmatch runs lists them.")
        below = [folder] if RunDirectory(folder).record.is_file() else finished_below(folder, "**/record.json")
        if not below:
            raise DataError(f"there is no finished run in {folder}.\nTrain first, or run the same command again to resume.")
        found |= dict.fromkeys([max(below, key=_finished_at)] if newest else below)
    return list(found)


def find_run(path: Path | str) -> Path:
    """The directory of one finished run: `path` itself, the only one below it, or the newest one for `latest`.

    A directory with nothing but a model is returned as it is.
    """
    if RunDirectory(Path(path)).model_config.is_file():
        return Path(path)
    found = find_runs([Path(path)])
    if len(found) > 1:
        some = ", ".join(str(run.relative_to(path)) for run in found[:3]) + " and others" * (len(found) > 3)
        raise RequestError(f"there are {len(found)} finished runs in {path}: {some}.\nName one.")
    return found[0]


def finished_below(path: Path, pattern: str) -> list[Path]:
    """Directories of the records that match `pattern`, without runs that `--fresh` set aside."""
    return sorted(file.parent for file in path.glob(pattern) if not RunDirectory(file.parent).is_aside)


def read_record(run: Path) -> RunRecord:
    """The record of a finished run."""
    record = RunDirectory(run).read_record()
    if record is None:
        raise DataError(f"{run} has no record.json: it is not a finished run.\nRun its command again to finish it.")
    return record


def short_names(runs: Sequence[Path]) -> dict[Path, str]:
    """Names for legends: those of setting, method and split in which the runs differ, or whole paths if none is unique."""
    parts = {run: run.absolute().parts[-3:] for run in runs}
    differ = [len(set(column)) > 1 or len(runs) == 1 for column in zip(*parts.values(), strict=False)]
    names = {run: "/".join(part for part, kept in zip(three, differ, strict=False) if kept) for run, three in parts.items()}
    return names if len(set(names.values())) == len(names) else {run: str(run) for run in runs}


def _finished_at(run: Path) -> float:
    return RunDirectory(run).record.stat().st_mtime
