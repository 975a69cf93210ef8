"""Backbones of transformers: tiny models with random weights, saved and compared with the library's own outputs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from crmatch.errors import DataError, RequestError
from crmatch.networks.pretrained import transformers as adapter
from crmatch.networks.pretrained.transformers_config import FAMILIES
from tiny_backbones import assert_exports_with_any_batch, assert_same_outputs, images, make_torchvision_importable, randomize

os.environ["HF_HUB_OFFLINE"] = "1"
make_torchvision_importable()
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'crmatch[hf]'")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Tiny(NamedTuple):
    """A small model: its config, the stride of its map, and the class and register tokens before its patch tokens."""

    config: dict[str, Any]
    stride: int
    prefix: int = 0
    options: dict[str, bool] = {}  # noqa: RUF012


INTERPOLATE = {"interpolate_pos_encoding": True}
VIT = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
WIDE = VIT | {"intermediate_size": 16}
CONVNEXT = {"hidden_sizes": [4, 4, 4, 8], "depths": [1, 1, 1, 1]}
SWIN = {"embed_dim": 4, "depths": [1, 2], "num_heads": [1, 2], "window_size": 2, "image_size": 32}
EFFICIENTNET = {"width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256, "image_size": 32}
TINY = {
    "clip_vision_model": Tiny(WIDE, 8, 1, INTERPOLATE),
    "convnext": Tiny(CONVNEXT, 32),
    "convnextv2": Tiny(CONVNEXT, 32),
    "dinov2": Tiny(VIT, 8, 1),
    "dinov2_with_registers": Tiny(VIT | {"num_register_tokens": 3}, 8, 4),
    "dinov3_convnext": Tiny(CONVNEXT, 32, 1),
    "dinov3_vit": Tiny(WIDE | {"num_register_tokens": 2}, 8, 3),
    "efficientnet": Tiny(EFFICIENTNET, 32),
    "mobilenet_v2": Tiny({"depth_multiplier": 0.25, "image_size": 32}, 32),
    "resnet": Tiny({"embedding_size": 4, **CONVNEXT}, 32),
    "siglip_vision_model": Tiny(WIDE, 8, 0, INTERPOLATE),
    "swin": Tiny(SWIN, 8, 0, INTERPOLATE),
    "vit": Tiny(WIDE, 8, 1, INTERPOLATE),
}
MEAN_STD = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}


def tiny_model(family: str) -> Any:
    return randomize(transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **TINY[family].config)))


def save(model: Any, directory: Path, processor: dict[str, Any] | None = None) -> str:
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor or {"size": 32, **MEAN_STD}))
    return str(directory)


@pytest.fixture
def vit(tmp_path: Path) -> str:
    return save(tiny_model("vit"), tmp_path)


def test_every_family_has_a_test() -> None:
    assert set(TINY) == set(FAMILIES)


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("family", TINY)
def test_map_and_pooled_are_those_of_the_library(family: str, size: tuple[int, int], tmp_path: Path) -> None:
    tiny, model, (height, width) = TINY[family], tiny_model(family), size
    body = adapter.load(save(model, tmp_path)).module.eval()
    with torch.no_grad():
        output = model(images(height, width), **tiny.options)
        feature_map, pooled = body(images(height, width))
    rows, columns = height // tiny.stride, width // tiny.stride
    assert feature_map.shape[2:] == (rows, columns)
    assert feature_map.dtype == pooled.dtype == torch.float32
    if output.last_hidden_state.ndim == 4:
        assert torch.equal(feature_map, output.last_hidden_state)
    else:
        for row in range(rows):
            for column in range(columns):
                token = output.last_hidden_state[:, tiny.prefix + row * columns + column]
                assert torch.equal(feature_map[:, :, row, column], token)
    assert torch.equal(pooled, output.pooler_output.reshape(2, -1))
    assert pooled.std(dim=0).max() > 1e-3, "the images make no difference"


@pytest.mark.parametrize("family", ["resnet", "mobilenet_v2", "efficientnet", "convnext"])
def test_convolutional_networks_pool_by_the_mean(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        feature_map, pooled = adapter.load(save(model, tmp_path)).module.eval()(images(64, 64))
        expected = feature_map.mean(dim=(2, 3))
        if family == "convnext":  # and normalizes it
            expected = F.layer_norm(expected, (8,), model.layernorm.weight, model.layernorm.bias, model.layernorm.eps)
    torch.testing.assert_close(pooled, expected)


@pytest.mark.parametrize("family", TINY)
def test_a_body_is_built_again_from_its_architecture(family: str, tmp_path: Path) -> None:
    module, architecture = adapter.load(save(tiny_model(family), tmp_path))
    again = adapter.build(json.loads(json.dumps(architecture)))
    again.load_state_dict(module.state_dict())
    assert_same_outputs(module, again)


@pytest.mark.parametrize("family", ["dinov2_with_registers", "vit"])
def test_an_exported_body_takes_any_number_of_images(family: str, tmp_path: Path) -> None:
    assert_exports_with_any_batch(adapter.load(save(tiny_model(family), tmp_path)).module, 64)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_of_a_model_of_pictures_and_texts_the_vision_tower_is_taken(family: str, tmp_path: Path) -> None:
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.AutoConfig.for_model(family, vision_config=WIDE, text_config=text)
    model = randomize(transformers.AutoModel.from_config(config))
    source = save(model, tmp_path)
    with torch.no_grad():
        expected = model.vision_model(images(64, 64), **INTERPOLATE).pooler_output
        _, pooled = adapter.load(source).module.eval()(images(64, 64))
    assert torch.equal(pooled, expected)
    assert adapter.describe(source).multiple_of == 8


def test_without_weights_of_the_pooler_the_class_token_is_the_pooled_vector(tmp_path: Path) -> None:
    classifier = randomize(transformers.ViTForImageClassification(transformers.ViTConfig(**WIDE)))
    module, architecture = adapter.load(save(classifier, tmp_path))
    again = adapter.build(architecture)
    again.load_state_dict(module.state_dict())
    with torch.no_grad():
        logits = classifier(images(32, 32)).logits
        for body in (module.eval(), again.eval()):
            torch.testing.assert_close(classifier.classifier(body(images(32, 32))[1]), logits)


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    model = tiny_model("vit")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    source = str(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    with torch.no_grad():
        assert torch.equal(adapter.load(source).module.eval()(images(32, 32))[1], model(images(32, 32)).pooler_output)
    before = adapter.checksum(source)
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(b"")
    assert adapter.checksum(source) != before


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    module, architecture = adapter.load(save(tiny_model("vit").half(), tmp_path))
    assert {p.dtype for p in [*module.parameters(), *adapter.build(architecture).parameters()]} == {torch.float32}


def test_sizes_that_the_model_would_crop_are_refused(vit: str) -> None:
    with pytest.raises(RequestError, match="multiples of 8"):
        adapter.load(vit).module(images(36, 36))


PROCESSORS: dict[str, dict[str, Any]] = {
    "vit": {"image_processor_type": "ViTImageProcessor", "size": {"height": 48, "width": 48}, **MEAN_STD},
    "convnext": {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 48}, "crop_pct": 0.9, **MEAN_STD},
    "clip_vision_model": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 60},
        "crop_size": {"height": 48, "width": 48},
        "do_center_crop": True,
        **MEAN_STD,
    },
    "efficientnet": {
        "image_processor_type": "EfficientNetImageProcessor",
        "size": {"height": 48, "width": 48},
        "crop_size": {"height": 40, "width": 40},
        "do_center_crop": False,
        "rescale_factor": 1 / 127.5,
        "rescale_offset": True,
        "include_top": True,
        **MEAN_STD,
    },
}


@pytest.mark.parametrize("family", PROCESSORS)
def test_described_input_is_what_the_image_processor_makes(family: str, tmp_path: Path) -> None:
    source = save(tiny_model(family), tmp_path, PROCESSORS[family])
    size, mean, std, multiple_of = adapter.describe(source)
    assert (size, multiple_of) == (48, TINY[family].config.get("patch_size", 1) if TINY[family].options else 1)
    color = torch.tensor([10, 100, 250], dtype=torch.uint8)
    picture = color.repeat(60, 60, 1).numpy()
    made = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")(picture, return_tensors="pt").pixel_values
    assert made.shape == (1, 3, size, size)
    torch.testing.assert_close((color / 255 - torch.tensor(mean)) / torch.tensor(std), made[0, :, 24, 24])


def test_what_config_files_leave_out_is_known(vit: str) -> None:
    directory = Path(vit)
    (directory / "config.json").write_text(json.dumps({"model_type": "siglip", "vision_config": {}}))
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": MEAN_STD}))
    assert adapter.describe(vit) == (224, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 16)


def test_a_downloaded_name_is_found_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    directory = save(tiny_model("vit"), repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert adapter.resolve("owner/tiny") == Path(directory)
    assert adapter.checksum("owner/tiny") == adapter.checksum(directory)


def test_a_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RequestError, match="no such directory"):
        adapter.resolve("./no/such/directory")


@pytest.mark.parametrize(
    ("error", "remedy"), [("GatedRepoError", "Agree at"), ("RepositoryNotFoundError", "Check the spelling")]
)
def test_repositories_that_cannot_be_read_have_a_remedy(error: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    def refuse(*_: Any, **__: Any) -> None:
        kind = getattr(errors, error)
        raise kind.__new__(kind)  # a response of the server is all that its __init__ wants

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(RequestError, match=f"hf:facebook/dinov3-vits16(.|\n)*{remedy}"):
        adapter.resolve("facebook/dinov3-vits16")


def test_a_failed_download_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_the_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fill_the_disk)
    with pytest.raises(DataError, match=r"hf:owner/large cannot be downloaded.*No space left"):
        adapter.resolve("owner/large")


def write_index_of_pickles(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"layernorm.weight": "pytorch_model.bin"}}')


def lose_a_shard(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_unknown_type(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "bert"}')


def break_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (write_index_of_pickles, DataError, "pytorch_model.bin may run code"),
        (lose_a_shard, DataError, "no model-00002-of-00002.safetensors"),
        (write_unknown_type, RequestError, "'bert'(.|\n)*dinov2"),
        (break_config, DataError, "config.json cannot be read"),
        (lambda directory: (directory / "config.json").unlink(), DataError, "no config.json"),
    ],
)
def test_a_damaged_or_foreign_directory_says_so(
    damage: Callable[[Path], None], error: type[Exception], message: str, vit: str
) -> None:
    damage(Path(vit))
    with pytest.raises(error, match=message):
        adapter.load(vit)


def test_unknown_mean_and_std_are_not_guessed(vit: str) -> None:
    (Path(vit) / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match=r"preprocessor_config.json"):
        adapter.describe(vit)
