"""Fixtures of runs that start from a pretrained backbone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pretrained_runs import tuned

from crmatch.runs.workspace import Workspace
from finished import stripes_in


@pytest.fixture(autouse=True, scope="module")
def _fast() -> Iterator[None]:
    """An ONNX export takes seconds, and one test compares the two ways. Heads on stripes need few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crmatch.networks.pretrained.inference.onnxruntime_is_installed", lambda: False)
        patch.setattr("crmatch.runs.cross_validation.STEPS", 40)
        yield


@pytest.fixture(scope="module")
def with_head(_fast: None, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Stored features, and the head that runs of recipe `tune` train first: 600 steps."""
    folder = tmp_path_factory.mktemp("pretrained")
    workspace = Workspace(folder / "runs", stripes_in(folder / "data"))
    tuned(workspace)
    return workspace


@pytest.fixture
def workspace(with_head: Workspace, tmp_path: Path) -> Workspace:
    """Runs of its own, which begin with the trained head."""
    return Workspace(shutil.copytree(with_head.out, tmp_path / "runs"), with_head.data_dir)
