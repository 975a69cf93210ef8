"""Records: one JSON per finished run, written once, and the directory each run lives in. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from crmatch.config import RunSpec, parse_spec
from crmatch.data.settings import Setting
from crmatch.errors import DataError, RequestError
from crmatch.files import read_json, write_file
from crmatch.frozen import Frozen
from crmatch.recipes import variant

MEDIAN_OF = 20
MODEL_WEIGHTS = "model.safetensors"
MODEL_CONFIG = "config.json"
MODEL_CARD = "README.md"


class Errors(Frozen):
    """Test errors of one model in percent, by the rules that people report."""

    last: float
    median_last_20: float
    """Median of the last 20 evaluations (of all, where there were fewer)."""
    best_on_test: float
    """The lowest over all evaluations: chosen on the test set, never a headline."""

    @classmethod
    def from_curve(cls, errors: Sequence[float]) -> Self:
        """From the errors of all evaluations in order."""
        return cls(last=errors[-1], median_last_20=statistics.median(errors[-MEDIAN_OF:]), best_on_test=min(errors))


class RunRecord(Frozen):
    """What a finished run leaves behind."""

    spec: RunSpec
    numerics: int
    crmatch_version: str
    evaluated: Literal["ema", "raw"]
    """Which model counts."""
    ema: Errors | None
    raw: Errors | None
    """None for both where there is no test set."""
    per_class_error: list[float | None]
    """None for a class without a test image."""
    confusion: list[list[int]]
    calibration_error: float | None
    class_names: list[str]
    labeled_images: int
    unlabeled_images: int
    test_images: int
    data_fingerprint: str
    steps: int
    images_seen: int
    """Images that went through the network in training."""
    seconds: float
    machine: dict[str, Any]
    final: dict[str, Any]
    """The last line of the curves."""
    policy: dict[str, list[list[float]]] | None = None
    """What a learning policy learned: operation -> the rates of each parameter's bins."""

    @property
    def error(self) -> float | None:
        """The headline: test error of the evaluated model by the spec's rule, in percent."""
        errors = self.ema if self.evaluated == "ema" else self.raw
        return None if errors is None else float(getattr(errors, self.spec.headline))


def parse_record(values: Any, path: Path) -> RunRecord:
    """The record in JSON values that were read from `path`."""
    try:
        return RunRecord.model_validate(values)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"{path} is no run record: {reason}.\nThe file is damaged; remove it to run again.") from error


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
