"""Tiny finished runs and folders of pictures for tests of analyses, reports and the guide."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from conftest import tiny_spec, write_packed
from crmatch.runs.directory import RunDirectory

TIMES = {"seconds", "images_per_second", "steps_per_second"}
HOSTILE_NAMES = ("<script>alert(1)</script>", 'salt & "pepper" \'n', "Größe $x$ 🐈")


def train_tiny(out: Path, data_dir: Path, method: str = "crmatch", **changes: Any) -> Path:
    """Train 20 steps on stripes; returns the run's directory."""
    from crmatch.runs.run import run
    from crmatch.runs.workspace import Workspace
    from crmatch.training.execution import Execution

    spec, workspace = tiny_spec(data_dir, method, **changes), Workspace(out, data_dir)
    run(spec, workspace, Execution("cpu"))
    return workspace.run_directory(spec).path


class Result(NamedTuple):
    """Everything a finished run left, except times."""

    state: dict[str, bytes]
    curves: list[dict[str, Any]]
    model: bytes
    record: dict[str, Any]


def result_of(directory: RunDirectory) -> Result:
    from crmatch.training.checkpoint import load_checkpoint

    checkpoint, record = load_checkpoint(directory.checkpoints), directory.read_record()
    assert checkpoint is not None
    assert record is not None
    assert checkpoint.step == record.steps
    assert not list(directory.path.rglob("*.tmp")), "a killed writer's file is still there"
    state = {name: tensor.contiguous().numpy().tobytes() for name, tensor in checkpoint.tensors.items()}
    curves = [{key: value for key, value in line.items() if key not in TIMES} for line in directory.read_metrics()]
    # Somebody may commit while the tests run.
    values = record.model_dump(exclude={"seconds": True, "final": True, "machine": {"commit"}})
    return Result(state, curves, directory.model.read_bytes(), values)


def stripes_in(folder: Path, **changes: Any) -> Path:
    """A data directory with the packed set `stripes`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_packed(folder / "stripes.npz", **changes)
    return folder


def write_photos(folder: Path, **counts: int) -> Path:
    """Pictures of two classes, brighter on the left or above, numbered through the parts, e.g. labeled=4, unlabeled=20."""
    random = np.random.default_rng(0)
    for number, part in enumerate(part for part, count in counts.items() for _ in range(count)):
        pixels = random.integers(0, 90, (24, 30, 3), dtype=np.uint8)
        pixels[(slice(12), slice(None)) if number % 2 else (slice(None), slice(15))] += 120
        place = folder / part / (("across", "down")[number % 2] if part in ("labeled", "test") else "")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:02d}.jpg")
    return folder
