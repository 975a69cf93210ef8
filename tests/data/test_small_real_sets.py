"""The six small real sets: each loads, trains 100 steps of `quick` and learns something (minutes; `make slow-test`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import SHARED_DATA
from crmatch.data.settings import parse_setting
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the small real image sets are not on this machine")
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "stl10", "mini_imagenet", "eurosat"])
def test_a_hundred_steps_beat_guessing(tmp_path: Path, name: str) -> None:
    setting = parse_setting(f"{name}_small@25", SHARED_DATA)
    record = run(replace(recipe(setting), **{"plan.steps": 100}), Workspace.at(tmp_path, SHARED_DATA))
    assert record.error is not None
    print(f"{setting.name}: {record.error:.1f} % after 100 steps, {record.seconds:.0f} s")
    guessing = 100 * (1 - 1 / len(record.class_names))
    assert record.error < guessing - (0.5 if len(record.class_names) == 100 else 4)
