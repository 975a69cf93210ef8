"""Backbones of timm: tiny models with random weights, saved and compared with the library's own outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from crmatch.errors import DataError, RequestError
from crmatch.networks.pretrained import timm as adapter
from tiny_backbones import assert_exports_with_any_batch, assert_same_outputs, images, make_torchvision_importable, randomize

os.environ["HF_HUB_OFFLINE"] = "1"
make_torchvision_importable()
timm = pytest.importorskip("timm", reason="timm or torchvision is not installed: pip install 'crmatch[timm]'")


class Tiny(NamedTuple):
    """A small model: its arguments, the stride of its map, class and register tokens, and what image sizes must be."""

    arguments: dict[str, Any]
    stride: int
    prefix: int = 0
    multiple_of: int = 1


VIT = {"embed_dim": 8, "depth": 2, "num_heads": 2}
TINY = {
    "convnext_atto": Tiny({"depths": (1, 1, 1, 1), "dims": (4, 4, 4, 8)}, 32),
    "deit_tiny_distilled_patch16_224": Tiny({"img_size": 32, **VIT}, 16, 2, 16),
    "mobilenetv4_conv_small_035": Tiny({}, 32),
    "resnet18": Tiny({"channels": (4, 4, 4, 8)}, 32),
    "swin_tiny_patch4_window7_224": Tiny({"img_size": 56, "embed_dim": 4, "depths": (1, 1), "num_heads": (1, 1)}, 8, 0, 56),
    "test_efficientnet": Tiny({}, 32),
    "vit_small_patch14_dinov2": Tiny({"img_size": 28, **VIT}, 14, 1, 14),
    "vit_small_patch16_dinov3": Tiny({"img_size": 32, **VIT}, 16, 5, 16),
    "vit_tiny_patch16_224": Tiny({"img_size": 32, "patch_size": 8, **VIT}, 8, 1, 8),
}


def saved(name: str, directory: Path) -> tuple[Any, str]:
    model = randomize(timm.create_model(name, num_classes=5, **TINY[name].arguments))
    timm.models.save_for_hf(model, directory, safe_serialization=True)
    return model, str(directory)


@pytest.fixture
def resnet(tmp_path: Path) -> str:
    return saved("resnet18", tmp_path)[1]


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (2, 1)], ids=["native", "larger", "rectangle"])
@pytest.mark.parametrize("name", TINY)
def test_map_and_pooled_are_those_of_the_library(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    tiny = TINY[name]
    height, width = (side * tiny.arguments.get("img_size", 32) for side in size)
    model, source = saved(name, tmp_path)
    body = adapter.load(source).module.eval()
    if name.startswith("swin") and size != (1, 1):
        with pytest.raises(RequestError, match="56 x 56 only"):
            body(images(height, width))
        return
    if tiny.multiple_of > 1:  # the library resizes position embeddings while loading; ours does so in each pass
        model = timm.create_model(f"local-dir:{source}", pretrained=True, img_size=(height, width)).eval()
    with torch.no_grad():
        features = model.forward_features(images(height, width))
        expected = model.forward_head(features, pre_logits=True)
        feature_map, pooled = body(images(height, width))
        logits = model(images(height, width))
    rows, columns = height // tiny.stride, width // tiny.stride
    assert feature_map.shape[2:] == (rows, columns)
    for row in range(rows):
        for column in range(columns):
            found = feature_map[:, :, row, column]
            if features.ndim == 3:
                torch.testing.assert_close(found, features[:, tiny.prefix + row * columns + column])
            else:
                assert torch.equal(found, features[:, row, column] if "swin" in name else features[:, :, row, column])
    torch.testing.assert_close(pooled, expected)
    if "distilled" not in name:  # which has two classifiers
        torch.testing.assert_close(model.get_classifier()(pooled), logits)
    assert pooled.std(dim=0).max() > 1e-3, "the images make no difference"


@pytest.mark.parametrize("name", TINY)
def test_a_body_is_built_again_from_its_architecture(name: str, tmp_path: Path) -> None:
    module, architecture = adapter.load(saved(name, tmp_path)[1])
    again = adapter.build(json.loads(json.dumps(architecture)))
    again.load_state_dict(module.state_dict())
    assert_same_outputs(module, again, TINY[name].arguments.get("img_size", 64))


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"])
def test_an_exported_body_takes_any_number_of_images(name: str, tmp_path: Path) -> None:
    assert_exports_with_any_batch(adapter.load(saved(name, tmp_path)[1]).module, TINY[name].arguments["img_size"])


@pytest.mark.parametrize("name", TINY)
def test_described_input_is_what_the_library_says(name: str, tmp_path: Path) -> None:
    _, source = saved(name, tmp_path)
    expected = timm.data.resolve_data_config({}, model=timm.create_model(f"local-dir:{source}"))
    size, mean, std, multiple_of = adapter.describe(source)
    assert (size, list(mean), list(std)) == (expected["input_size"][-1], expected["mean"], expected["std"])
    assert multiple_of == TINY[name].multiple_of


def test_a_config_in_one_object_is_read(resnet: str) -> None:
    """As timm wrote them before version 0.9."""
    before, file = adapter.describe(resnet), Path(resnet) / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({"architecture": "resnet18", "num_features": 8, **config["pretrained_cfg"]}))
    assert adapter.describe(resnet) == before


def test_sizes_that_the_model_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="multiples of 14"):
        adapter.load(saved("vit_small_patch14_dinov2", tmp_path)[1]).module(images(32, 32))


def test_models_without_a_grid_of_tokens_are_refused() -> None:
    from crmatch.networks.pretrained.library_bodies import tokens_as_map

    with pytest.raises(RequestError, match="no grid"):
        tokens_as_map(torch.zeros(1, 17, 8), images(32, 32))


def test_names_lead_to_their_repository_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, repository: str, extra: str) -> Path:
        raise DataError(f"{extra}: {repository}")

    monkeypatch.setattr(adapter, "download", download)
    for name, repository in {
        "resnet18": "timm/resnet18.a1_in1k",
        "resnet18.tv_in1k": "timm/resnet18.tv_in1k",
        "apple/mobileclip_s0_timm": "apple/mobileclip_s0_timm",
    }.items():
        with pytest.raises(DataError, match=f"timm: {repository}"):
            adapter.resolve(name)
    with pytest.raises(RequestError, match="Did you mean resnet18"):
        adapter.resolve("resnet18x")


def test_weights_in_several_files_are_refused(resnet: str) -> None:
    (Path(resnet) / "model.safetensors").rename(Path(resnet) / "model-00001-of-00002.safetensors")
    (Path(resnet) / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(DataError, match=r"no model.safetensors"):
        adapter.load(resnet)
