"""Features of a frozen backbone: computed once, stored, and the same as the backbone's own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crmatch.predict.label_suggestions import read_run
from crmatch.runs.features import FeatureStore
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace
from pretrained_runs import SMALL, head_experiment, needs_backbone, spec_of

pytestmark = [needs_backbone, pytest.mark.usefixtures("fast_heads")]


def test_features_are_computed_once_and_other_images_or_augmentations_are_other_features(
    stripes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(data_dir=stripes)
    computed: list[str] = []
    compute = FeatureStore.compute
    monkeypatch.setattr(
        FeatureStore, "compute", lambda self, view, *others: (computed.append(view), compute(self, view, *others))
    )
    spec = spec_of(workspace)
    first = head_experiment(workspace, spec)
    assert computed == ["none", "weak0", "strong0", "strong1", "none"]  # the last one of the test images
    again = head_experiment(workspace, replace(spec, seed=1))
    assert len(computed) == 5
    assert all(np.array_equal(*pair) for pair in zip(first.banks["strong"], again.banks["strong"], strict=True))
    head_experiment(workspace, replace(spec, **{"augmentation.mirror": not spec.augmentation.mirror}))
    assert len(computed) == 10


def test_a_killed_computation_of_features_goes_on_where_it_was(stripes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(data_dir=stripes)
    compute, spec = FeatureStore.compute, spec_of(workspace)

    def dies(self: FeatureStore, view: str, *others: Any) -> None:
        if view == "strong1":
            raise KeyboardInterrupt
        compute(self, view, *others)

    monkeypatch.setattr(FeatureStore, "compute", dies)
    with pytest.raises(KeyboardInterrupt):
        head_experiment(workspace, spec)
    computed: list[str] = []
    monkeypatch.setattr(
        FeatureStore, "compute", lambda self, view, *others: (computed.append(view), compute(self, view, *others))
    )
    head_experiment(workspace, spec)
    assert computed == ["strong1", "none"]


def test_stored_features_are_the_backbones_own(workspace: Workspace) -> None:
    spec = spec_of(workspace)
    experiment = head_experiment(workspace, spec)
    network = experiment.deployed_network(experiment.training().models)
    with torch.no_grad():
        _, features = network.backbone.body.eval()(experiment.normalizer(experiment.data.train.images))
    stored = torch.from_numpy(experiment.banks["none"][0].astype(np.float32))
    torch.testing.assert_close(stored, features, rtol=2e-3, atol=2e-3)
    assert torch.allclose(experiment.center, (stored / (stored.abs() + 1e-3).sqrt()).mean(dim=0))


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_damaged_features_are_computed_again(workspace: Workspace, tmp_path: Path, content: bytes | None) -> None:
    spec = replace(recipe(workspace.setting("stripes@4"), "crmatch", "head"), **SMALL)
    store = FeatureStore(spec, torch.zeros(4, 3, 32, 32, dtype=torch.uint8), tmp_path)
    store.folder.mkdir()
    whole = io.BytesIO()
    np.save(whole, np.zeros((4, 7), np.float16))
    (store.folder / "none.npy").write_bytes(whole.getvalue())
    assert store.missing(["none"]) == []
    (store.folder / "none.npy").write_bytes(whole.getvalue()[:-9] if content is None else content)
    assert store.missing(["none"]) == ["none"]


def test_onnxruntime_gives_the_same_features(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from crmatch.networks.pretrained.inference import feature_function
    from crmatch.networks.pretrained.load import load_body

    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    by_torch = feature_function(load_body("efficientnet-lite0").module, 32, torch.device("cpu")).compute(images)
    monkeypatch.setattr("crmatch.networks.pretrained.inference.onnxruntime_is_installed", lambda: True)
    by_onnx = feature_function(load_body("efficientnet-lite0").module, 32, torch.device("cpu")).compute
    torch.testing.assert_close(by_onnx(images), by_torch, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_onnx(images[:2, :1]), by_onnx(images[:2, :1].expand(-1, 3, -1, -1)))


def test_suggestions_of_a_head_come_from_its_stored_features(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(workspace)
    run(spec, workspace)
    path = workspace.run_directory(spec).path
    with monkeypatch.context() as patch:
        patch.setattr("crmatch.analysis.finished_run.FinishedRun.weak", None)  # no view is made again
        stored = read_run(path, workspace).scores
    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "missing", lambda store, views: views)
        computed = read_run(path, workspace).scores
    assert torch.equal(stored.rows, computed.rows)
    assert torch.allclose(stored.probabilities, computed.probabilities, atol=0.01)  # features are stored in half precision
    assert torch.allclose(stored.features, computed.features, atol=0.01)
    assert stored.disagreement.max() > 0
