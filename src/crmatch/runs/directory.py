"""The directory of a run: its name, its files, and the curves. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crmatch.atomic_files import read_json, write_file
from crmatch.data.settings import Setting
from crmatch.errors import DataError, RequestError
from crmatch.runs.record import RunRecord, parse_record
from crmatch.spec.recipes import changed_keys, default_recipe
from crmatch.spec.run_spec import RunSpec, parse_spec

LONGEST_VARIANT = 60


def variant(spec: RunSpec, setting: Setting) -> str:
    """What a run's directory says after its method: the recipe if it is not the default, then every changed key.

    Made from the spec, never typed, so that two specs never share a directory. Longer than 60 characters: the first 40
    and 8 hex digits of the spec's hash, which is that of split 1 and seed 0: splits and seeds of a variant lie side by side.
    """
    parts = [] if spec.recipe == default_recipe(setting) else [spec.recipe]
    parts += [f"labels={spec.data.labels_checksum}"] if spec.data.labels_checksum else []
    for key, value in changed_keys(spec, setting).items():
        text = str(value).replace(" ", "").replace("/", "_")
        parts.append(f"{key}={text}")
    whole = ",".join(parts)
    if len(whole) <= LONGEST_VARIANT:
        return whole
    return f"{whole[:40]}-{spec.model_copy(update={'split': 1, 'seed': 0}).hash}"


MODEL_WEIGHTS = "model.safetensors"
MODEL_CONFIG = "config.json"
MODEL_CARD = "README.md"


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec = path / "spec.json"
        self.split = path / "split.json"
        self.metrics = path / "metrics.jsonl"
        self.record = path / "record.json"
        self.model = path / MODEL_WEIGHTS
        self.model_config = path / MODEL_CONFIG
        self.card = path / MODEL_CARD
        self.checkpoints = path / "checkpoint"
        self.tensorboard = path / "tensorboard"
        self.lock = path / "run.lock"

    def aside(self, number: int) -> Path:
        """Where the run is kept when it is set aside to be trained anew, for the `number`th time."""
        return self.path.with_name(f"{self.path.name}.old{number}")

    @property
    def is_aside(self) -> bool:
        """Whether this is a run that was set aside."""
        return re.search(r"\.old\d+$", self.path.name) is not None

    def read_spec(self) -> RunSpec | None:
        """The spec that was started here; None where nothing was."""
        if not self.spec.exists():
            return None
        try:
            return parse_spec(read_json(self.spec))
        except RequestError as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{self.spec} is no spec of a run: {reason}\nThe file is damaged; remove the directory.") from error

    def read_record(self) -> RunRecord | None:
        """The record of a finished run; None where it is not finished."""
        if not self.record.exists():
            return None
        return parse_record(read_json(self.record), self.record)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The curves; a line that a kill cut short is left out."""
        return list(_lines(self.metrics)) if self.metrics.exists() else []


class CurveFile:
    """`metrics.jsonl`: one line per log point; lines after the point of continuation are dropped.

    Of the processes that share a run one `writes`; the others keep the same lines in memory.
    """

    def __init__(self, directory: RunDirectory, step: int, writes: bool = True) -> None:
        self.lines = [line for line in directory.read_metrics() if line["step"] <= step]
        self._path = directory.metrics if writes else Path(os.devnull)
        if writes:
            write_file(self._path, "".join(json.dumps(line) + "\n" for line in self.lines).encode())

    def __enter__(self) -> CurveFile:
        with self._writing():
            self._file = open(self._path, "a", encoding="utf-8")
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported when the line was written
            self._file.close()

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line and hand it to the system."""
        self.lines.append(dict(line))
        with self._writing():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def flush(self) -> None:
        """Put all lines on the disk, before a checkpoint that relies on them."""
        with self._writing():
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"cannot write {self._path}: {error.strerror}"
            raise DataError(f"{reason}.\nFree some space; the same command continues.") from error


def run_directory(out: Path, spec: RunSpec, setting: Setting) -> RunDirectory:
    """`<out>/<setting>/<method>[-<variant>]/split<k>-seed<s>/`."""
    changed = variant(spec, setting)
    name = f"{spec.method.name}-{changed}" if changed else spec.method.name
    return RunDirectory(out / spec.setting / name / f"split{spec.split}-seed{spec.seed}")


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """Lines of curves; only the last one may be cut short."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            int(line["step"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number == len(lines):
                return
            raise DataError(f"line {number} of {path} is damaged.\nMend it, or remove the directory to start again.") from error
        yield line
