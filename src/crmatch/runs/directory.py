"""The directory of a run: its name (and command), its files, its lock and its curves. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from crmatch.atomic_files import MOST_TEXT, checksum, make_directory, read_file, read_json, write_file
from crmatch.data.settings import Setting
from crmatch.errors import DataError, InUseError, RequestError
from crmatch.methods import kind_of
from crmatch.methods.base import StoredMethod
from crmatch.networks.config import OwnNetworkConfig
from crmatch.own_code import code_checksum, is_reference, reference_to, short_name
from crmatch.runs.record import RunRecord, parse_record
from crmatch.spec.recipes import (
    DEFAULT_BACKBONE,
    FOLLOW_FROM_MINUTES,
    default_recipe,
    quick_image_size,
    quick_start_size,
    recipe,
    unnamed_recipe,
)
from crmatch.spec.run_spec import RunSpec, differences, flatten, parse_spec

LONGEST_VARIANT, LONGEST_START = 60, 40
MODEL_WEIGHTS, MODEL_CONFIG, MODEL_CARD = "model.safetensors", "config.json", "README.md"


def run_directory(out: Path, spec: RunSpec, setting: Setting, name: str | None = None) -> RunDirectory:
    """`<out>/<setting>/<method>[-<variant>]/split<k>-seed<s>/`, or with a given name instead of method and variant.

    A run that an earlier version started under a longer name keeps it.
    """
    folder, last = out / _file_name(spec.setting), f"split{spec.split}-seed{spec.seed}"
    method = _file_name(spec.method.name)
    if name is None:
        changed, earlier = variant(spec, setting), earlier_variant(spec, setting)
        name, old = (f"{method}-{part}" if part else method for part in (changed, earlier))
        if name != old and (folder / old / last / "spec.json").exists():
            name = old
    return RunDirectory(folder / name / last)


def _file_name(name: str) -> str:
    """`mine.py:Name` as a file name: `mine.Name`."""
    return re.sub(r"(\.py)?:", ".", name)


def variant_parts(spec: RunSpec, setting: Setting) -> list[str]:
    """How a run differs from the default recipe of its method: the recipe, versions of code and labels, every changed key."""
    values = spec.to_json()
    leaves = [key.rpartition(".")[2] for key, _ in flatten(values)]
    codes = [code for code in (spec.method.code, spec.data.code, values["network"].get("code")) if code]
    parts = _named_parts(spec, setting)
    parts += [f"network={_file_name(short_name(spec.network.code))}"] if isinstance(spec.network, OwnNetworkConfig) else []
    parts += [f"code={digest}" for digest in dict.fromkeys(map(code_checksum, codes))]
    parts += [f"from={code_checksum(spec.start_from)}"] if spec.start_from else []
    for key, value in changed_keys(spec, setting).items():
        leaf = key.rpartition(".")[2]
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        short = leaf if leaves.count(leaf) == 1 else key
        parts.append(f"{short}={number}".replace(" ", "").replace("/", "_"))
    return parts


def variant(spec: RunSpec, setting: Setting) -> str:
    """The differences of a run in the name of its folder; two specs never share a variant.

    A long one keeps the parts that fit, and the hash of the spec with split 1 and seed 0, so that all splits and seeds of a
    variant share one folder.
    """
    parts = variant_parts(spec, setting)
    whole = ",".join(parts)
    if len(whole) <= LONGEST_VARIANT:
        return whole
    fitting = parts[:1]
    while len(",".join([*fitting, parts[len(fitting)]])) <= LONGEST_START:
        fitting.append(parts[len(fitting)])
    return f"{','.join(fitting)[:LONGEST_START]},and-{len(parts) - len(fitting)}-more-{_folder_hash(spec)}"


def earlier_variant(spec: RunSpec, setting: Setting) -> str:
    """The variant by the rule of crmatch 0.1, under which finished runs are still found."""
    parts = _named_parts(spec, setting)
    changed = changed_keys(spec, setting)
    parts += [f"{key}={value}".replace(" ", "").replace("/", "_") for key, value in changed.items()]
    whole = ",".join(parts)
    return whole if len(whole) <= LONGEST_VARIANT else f"{whole[:40]}-{_folder_hash(spec)}"


def _named_parts(spec: RunSpec, setting: Setting) -> list[str]:
    parts = [] if spec.recipe == unnamed_recipe(setting) else [spec.recipe]
    backbone = getattr(spec.network, "backbone", DEFAULT_BACKBONE)
    parts += [re.sub(r"[^\w.-]+", "_", backbone)] if backbone != DEFAULT_BACKBONE else []
    return parts + ([f"labels={spec.data.labels_checksum}"] if spec.data.labels_checksum else [])


def _folder_hash(spec: RunSpec) -> str:
    same: dict[str, Any] = {"split": 1, "seed": 0}
    if spec.plan.minutes is not None:  # its steps are chosen later
        same["plan"] = spec.plan.model_copy(update={**dict.fromkeys(FOLLOW_FROM_MINUTES, 1), "unlabeled_epochs": None})
    if getattr(spec.network, "size_chosen", False):
        same["data"] = spec.data.model_copy(update={"image_size": 0})
    return spec.model_copy(update=same).hash


def changed_keys(spec: RunSpec, setting: Setting) -> dict[str, Any]:
    """Every key, in order, whose value is not that of the spec's recipe."""
    base = recipe(setting, kind_of(spec.method), spec.recipe, getattr(spec.network, "backbone", DEFAULT_BACKBONE))
    if isinstance(spec.network, OwnNetworkConfig):
        base = base.model_copy(update={"network": OwnNetworkConfig(code=spec.network.code)})
    usual_size = base.data.image_size
    if spec.recipe == "quick" and spec.plan.minutes is not None:  # longer runs have larger images
        usual_size = quick_image_size(setting, spec.plan.minutes)
        start_size = quick_start_size(spec, spec.plan.minutes)
        base = base.model_copy(update={"plan": base.plan.model_copy(update={"start_size": start_size})})
    named = ["split", "seed", "setting", "recipe", "data.image_size", "data.labels_file", "data.labels_checksum", "start_from"]
    if spec.plan.minutes is not None:  # what follows from them
        named += ["plan.unlabeled_epochs", *(f"plan.{key}" for key in FOLLOW_FROM_MINUTES)]
    if getattr(spec.network, "size_chosen", False):
        named += ["network.size_chosen"]
    changed = {key: value for key, (value, _) in differences(spec, base).items() if key not in named}
    # A pretrained network's run without a size in its name is the one whose size is chosen.
    if not getattr(spec.network, "size_chosen", spec.data.image_size == usual_size):
        changed["data.image_size"] = spec.data.image_size
    if isinstance(spec.method, StoredMethod):  # its defaults are not known, so all of its values are shown
        changed |= {f"method.{key}": value for key, value in (spec.method.model_extra or {}).items()}
    return dict(sorted(changed.items()))


def keys_to_keep(spec: RunSpec, setting: Setting) -> dict[str, Any]:
    """What the next round takes from `spec` besides its recipe: everything but the labels, and the size if it was given."""
    base = recipe(setting, kind_of(spec.method), spec.recipe, getattr(spec.network, "backbone", DEFAULT_BACKBONE))
    named = ["setting", "recipe", "start_from", "data.folder", "data.labels_file", "data.labels_checksum"]
    if getattr(spec.network, "size_chosen", False):
        named.append("data.image_size")
    changed = {key: value for key, (value, _) in differences(spec, base).items() if not key.startswith("network.")}
    network = spec.network.model_dump(mode="json")
    network |= {key: getattr(base.network, key) for key in ("weights", "size_chosen") if key in network}
    keys = {"network": network, "data.image_size": spec.data.image_size, **changed}
    return {key: value for key, value in keys.items() if key not in named}


def method_reference(spec: RunSpec) -> str:
    """The method as a command names it: an installed method has its entry point's name, another one has a file."""
    own = spec.method.code
    return reference_to(own) if own and is_reference(spec.method.name) else spec.method.name


def train_command(spec: RunSpec, setting: Setting, *options: str) -> str:
    """The `crmatch train` command that trains `spec`, quoted for a shell; `options` come last."""
    own_data, method = spec.data.code, method_reference(spec)
    data = f"{reference_to(own_data)}@{spec.setting.rpartition('@')[2]}" if own_data else spec.setting
    words = ["crmatch", "train", spec.data.folder or data]
    words += ["--labels", spec.data.labels_file] if spec.data.labels_file else []
    words += ["--from", spec.start_from.rpartition("#")[0]] if spec.start_from else []
    words += ["--method", method] if method != "crmatch" else []
    # Runs of the paper's length start only if their recipe is named.
    is_default = spec.recipe == default_recipe(setting, kind_of(spec.method))
    words += ["--recipe", spec.recipe] if spec.recipe == "paper" or not is_default else []
    backbone = getattr(spec.network, "backbone", DEFAULT_BACKBONE)
    words += ["--backbone", backbone] if backbone != DEFAULT_BACKBONE else []
    words += ["--network", reference_to(spec.network.code)] if isinstance(spec.network, OwnNetworkConfig) else []
    words += ["--split", str(spec.split)] if spec.split != 1 else []
    words += ["--seed", str(spec.seed)] if spec.seed else []
    changed = changed_keys(spec, setting)
    if "network.kind" in changed:  # a network of another kind has other keys, so it is given as a whole
        changed = {key: value for key, value in changed.items() if not key.startswith("network.")}
        changed["network"] = spec.network.model_dump(mode="json")
    for key, value in changed.items():
        text = value if isinstance(value, str) else json.dumps(value)
        option = {"plan.steps": "--steps", "plan.minutes": "--minutes"}.get(key)
        words += [option, text] if option and value else ["--set", f"{key}={text}"]
    return shlex.join([*words, *options])


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
        self.mlflow = path / "mlflow.json"
        self.lock = path / "run.lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the directory, which is created if needed; raises `InUseError` if another process does."""
        try:
            self._check_directories()
            make_directory(self.path)
            lock = FileLock(self.lock).acquire(timeout=0)
        except Timeout as error:
            found = f"{self.path} is in use by another process"
            raise InUseError(f"{found}.\nWait until it ends, or choose another --out.") from error
        except OSError as error:
            reason = f"cannot write to {self.path}: {error.strerror}"
            raise DataError(f"{reason}.\nChoose a directory you may write to with --out.") from error
        with lock:
            yield

    def _check_directories(self) -> None:
        """A link in a folder of runs from a stranger would make a run write and remove files elsewhere."""
        for path in (*self.path.parents[:2], self.path, self.checkpoints, self.tensorboard):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise DataError(f"{path} is a link or a file, not a directory.\nRemove it, or choose another --out.")

    def set_aside(self) -> None:
        """Rename an existing directory to the first free `<name>.old<k>`, so that the run is trained from the beginning."""
        if self.path.exists():
            with self.locked():
                number = 1
                while (aside := self.path.with_name(f"{self.path.name}.old{number}")).exists():
                    number += 1
                self.path.rename(aside)

    @property
    def is_aside(self) -> bool:
        """Whether this run was set aside."""
        return re.search(r"\.old\d+$", self.path.name) is not None

    def read_spec(self) -> RunSpec | None:
        """The spec of the run; None if nothing was started here."""
        if not self.spec.exists():
            return None
        try:
            return parse_spec(read_json(self.spec), stored=True)
        except RequestError as error:
            found = f"{self.spec} is not the spec of a run: {str(error).splitlines()[0]}"
            raise DataError(f"{found}\nThe file is damaged; remove the directory.") from error

    def check_spec(self, found: RunSpec, wanted: RunSpec) -> None:
        """Raise a `RequestError` if the spec found in the directory is not the wanted one."""
        if found != wanted:
            changed = [f"{key} is {old!r} there, {new!r} here" for key, (old, new) in differences(found, wanted).items()]
            reason = f"{self.path} holds a run of another spec: {'; '.join(changed[:3])}"
            raise RequestError(f"{reason}.\nChoose another --out, or remove the directory.")

    def read_record(self) -> RunRecord | None:
        """The record of a finished run; None if it is not finished."""
        return parse_record(read_json(self.record), self.record) if self.record.exists() else None

    def model_checksum(self) -> str:
        """The checksum that the model's configuration has for its weights."""
        config = read_json(self.model_config)
        if not (isinstance(config, dict) and isinstance(config.get("checksum"), str)):
            raise DataError(f"{self.model_config} has no checksum of the weights.\nThe file is damaged; train again.")
        return str(config["checksum"])

    def model_is_intact(self) -> bool:
        """Whether the weights of a finished run are those that its configuration names."""
        try:
            return self.model_checksum() == checksum(read_file(self.model))
        except (DataError, OSError):
            return False

    def read_metrics(self) -> list[dict[str, Any]]:
        """The curves. The last line is left out if a kill cut it short; any other damaged line is an error."""
        if not self.metrics.exists():
            return []
        try:
            texts = read_file(self.metrics, MOST_TEXT).decode(errors="replace").splitlines()
        except OSError as error:
            raise DataError(f"{self.metrics} cannot be read: {error.strerror}.\nMake it readable, or restore it.") from error
        lines = []
        for number, text in enumerate(texts, start=1):
            try:
                lines.append(_checked_line(json.loads(text)))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                if number < len(texts):
                    reason = f"line {number} of {self.metrics} is damaged"
                    raise DataError(f"{reason}.\nRepair it, or remove the directory to start again.") from error
        return lines


def _checked_line(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the curves: a step, and numbers or None; test errors must be percentages."""
    for key, value in line.items():
        if value is not None:
            math.isfinite(value)  # an error for anything but a number
        if key.startswith("error/") and (value is None or not 0 <= value <= 100):
            raise ValueError(f"{key} is {value}")
    if type(line["step"]) is not int:
        raise TypeError("step is not an integer")
    return line


class CurveFile:
    """`metrics.jsonl`, one line per log point; lines after the step from which the run resumes are dropped.

    If several processes share a run, only the main one `writes`; the others keep the same lines in memory.
    """

    def __init__(self, directory: RunDirectory, step: int, writes: bool = True) -> None:
        self.lines = [line for line in directory.read_metrics() if line["step"] <= step]
        self._path, self._writes = directory.metrics, writes
        if writes:
            write_file(self._path, "".join(json.dumps(line) + "\n" for line in self.lines).encode())

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line and force it to disk: a checkpoint may rely on it, and a power failure may damage one line at most."""
        self.lines.append(dict(line))
        if not self._writes:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = f"cannot write {self._path}: {error.strerror}"
            raise DataError(f"{reason}.\nFree some space, then resume with the same command.") from error
