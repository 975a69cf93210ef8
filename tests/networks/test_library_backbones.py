"""What holds for backbones of both libraries, transformers and timm: light descriptions, checksums, damage, remedies."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from crmatch.errors import DataError, RequestError
from tiny_backbones import make_torchvision_importable

os.environ["HF_HUB_OFFLINE"] = "1"
make_torchvision_importable()


class Library(NamedTuple):
    package: str  # which is also the name of our adapter
    prefix: str  # of names of backbones
    model: str  # the name of a public model
    foreign: str  # a config.json of the other library
    remedy: str  # what the error about it suggests
    tensor: str  # one of the weights that `save` writes

    @property
    def adapter(self) -> Any:
        return importlib.import_module(f"crmatch.networks.pretrained.{self.package}")

    def save(self, directory: Path) -> None:
        """A small model."""
        if self.package == "timm":
            timm = importlib.import_module("timm")
            model = timm.create_model("resnet18", num_classes=5, channels=(4, 4, 4, 8))
            timm.models.save_for_hf(model, directory, safe_serialization=True)
            return
        transformers = importlib.import_module("transformers")
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(directory)
        values = {"size": 32, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
        (directory / "preprocessor_config.json").write_text(json.dumps(values))


LIBRARIES = [
    Library("transformers", "hf", "facebook/dinov2-small", '{"architecture": "resnet18"}', "Use timm:", "layernorm.weight"),
    Library("timm", "timm", "resnet18.a1_in1k", '{"model_type": "resnet"}', "Try hf:", "conv1.weight"),
]


@pytest.fixture(params=LIBRARIES, ids=lambda library: library.package)
def library(request: pytest.FixtureRequest, tmp_path: Path) -> Library:
    """A library, with a small model in `tmp_path`."""
    chosen: Library = request.param
    pytest.importorskip(chosen.package, reason=f"pip install 'crmatch[{chosen.prefix}]'")
    chosen.save(tmp_path)
    return chosen


@pytest.mark.process
def test_describing_and_hashing_import_neither_torch_nor_the_library(library: Library, tmp_path: Path) -> None:
    code = (
        f"import sys; from crmatch.networks.pretrained import {library.package} as adapter; "
        "adapter.describe(sys.argv[1]); adapter.checksum(sys.argv[1]); "
        f"sys.exit('torch' in sys.modules or '{library.package}' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path], check=False).returncode == 0


@pytest.mark.process
def test_a_name_fails_at_once_without_network(library: Library, tmp_path: Path) -> None:
    code = f"from crmatch.networks.pretrained import {library.package} as adapter; adapter.load({library.model!r})"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True)
    assert time.monotonic() - start < 5
    assert f"DataError: {library.prefix}:{library.model}" in result.stderr
    assert f"{library.prefix}:DIRECTORY" in result.stderr


def test_the_checksum_changes_with_one_byte(library: Library, tmp_path: Path) -> None:
    before, weights = library.adapter.checksum(str(tmp_path)), tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert len(before) == 16
    assert library.adapter.checksum(str(tmp_path)) != before


def write_pickle(directory: Path, library: Library) -> None:
    torch.save({}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def write_foreign_config(directory: Path, library: Library) -> None:
    (directory / "config.json").write_text(library.foreign)


def cut_weights(directory: Path, library: Library) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def drop_a_tensor(directory: Path, library: Library) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors[library.tensor]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (write_pickle, DataError, "no model.safetensors.*pytorch_model.bin may run code"),
        (write_foreign_config, RequestError, "{library.remedy}"),
        (cut_weights, DataError, "cannot be loaded"),
        (drop_a_tensor, DataError, "{library.tensor}"),
    ],
)
def test_a_damaged_or_foreign_directory_says_so(
    library: Library, tmp_path: Path, damage: Callable[[Path, Library], None], error: type[Exception], message: str
) -> None:
    damage(tmp_path, library)
    with pytest.raises(error, match=message.format(library=library)):
        library.adapter.load(str(tmp_path))


def test_missing_packages_are_named_with_the_extra(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = rf"pip install 'crmatch\[{library.prefix}\]'"
    monkeypatch.setitem(sys.modules, library.package, None)
    with pytest.raises(RequestError, match=remedy + (", and a torchvision that matches torch" * (library.prefix == "timm"))):
        library.adapter.load(str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RequestError, match=remedy):
        library.adapter.resolve(library.model)
