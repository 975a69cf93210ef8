"""Crashes and failures at some file operations; `make crash-points` tries all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from points import STEPS, Subject, subjects

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return subjects(tmp_path_factory.mktemp("points"))


@pytest.mark.parametrize(
    ("name", "every"),
    [("train", 23), ("data fetch", 13), ("data check, after a change", 9)],
)
def test_a_command_that_crashes_or_fails_ends_with_the_same_bits_when_it_is_run_again(
    commands: dict[str, Subject], name: str, every: int
) -> None:
    operations = len(commands[name].recorded[0].operations)
    assert operations > every
    assert [point for point in commands[name].cases(range(every // 2, operations + 1, every)) if point] == []


def test_a_run_syncs_what_it_writes(commands: dict[str, Subject]) -> None:
    operations = commands["train"].recorded[0].operations
    assert sum(kind == "fsync" and path.endswith("metrics.jsonl") for kind, path in operations) == STEPS
    renamed = [path for kind, path in operations if kind == "rename"]
    assert sum("/checkpoint/" in path for path in renamed) == 3
    assert {Path(path).name for path in renamed} > {"spec.json", "split.json", "model.safetensors", "README.md", "record.json"}


def test_the_layer_notices_a_writer_that_does_not_sync(commands: dict[str, Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    train = commands["train"]
    careless = Subject(train.root, train.arguments, train.result)
    monkeypatch.setattr("crmatch.atomic_files._sync_names", lambda directory: None)
    problem = careless.crash(len(careless.recorded[0].operations), "lost")
    assert problem is not None
    assert problem.problem == "3 checkpoints were saved, and the newest is of step 0"
