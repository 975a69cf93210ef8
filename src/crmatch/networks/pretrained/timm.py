"""Backbones of the library `timm`: `timm:DIRECTORY`, or `timm:NAME` and `timm:OWNER/NAME` on the Hugging Face Hub.

A directory holds config.json and model.safetensors, as timm.models.save_for_hf writes them. Other formats are not read.
Imports no torch, except to look up the default weights of a name without tag.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crmatch.errors import DataError, RequestError
from crmatch.networks.pretrained.catalog import BackboneInput
from crmatch.networks.pretrained.model_directory import check_files, download, read_json, weights_checksum

if TYPE_CHECKING:
    from torch import nn

    from crmatch.networks.pretrained.backbone import Body

DYNAMIC_SIZE = re.compile(r"(?:vit|deit3?|eva(?:02)?)_(?!s?relpos).*patch(\d+)")
"""Architectures that interpolate position embeddings if created with dynamic_img_size=True, and their patch size."""
NOT_A_SHAPE = {"pretrained", "checkpoint_path", "cache_dir", "pretrained_cfg_overlay"}
"""Arguments of create_model that make it read other files; a name with a colon does so, too."""
INPUT_KEYS = ("input_size", "fixed_input_size", "mean", "std", "num_classes", "pool_size", "first_conv", "classifier")
"""What `build` and `describe` need of `pretrained_cfg`."""


def resolve(source: str) -> Path:
    """The directory of the model: `source` itself, or that of its Hub repository in the local cache."""
    directory = Path(source).expanduser()
    if not directory.is_dir():
        directory = download(f"timm:{source}", _repository(source), "timm")
    return check_files(f"timm:{source}", directory)


def describe(source: str) -> BackboneInput:
    """What the model expects of its input, from its config.json."""
    config = _config(source, resolve(source))
    expected = config["pretrained_cfg"]
    return BackboneInput(expected["input_size"][-1], tuple(expected["mean"]), tuple(expected["std"]), _multiple_of(config))


def checksum(source: str) -> str:
    """First 16 hex digits of the sha256 of the weights."""
    return weights_checksum(resolve(source))


def load(source: str) -> Body:
    """The pretrained model without its classifier."""
    directory = resolve(source)
    config = _config(source, directory)
    timm = _library(f"timm:{source}")
    from safetensors import SafetensorError

    from crmatch.networks.pretrained.backbone import Body

    try:
        model = timm.create_model(f"local-dir:{directory}", pretrained=True, **_options(config))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DataError(f"timm:{source} cannot be loaded: {error}.\nCopy or download the model again") from error
    return Body(_body(model, config), {**config, "version": timm.__version__})


def build(architecture: dict[str, Any]) -> nn.Module:
    """The module of `load` with random weights."""
    arguments = {**architecture["model_args"], **_options(architecture)}
    if ":" in architecture["architecture"] or not NOT_A_SHAPE.isdisjoint(arguments):
        raise DataError("the architecture of this model names other files.\nThey are not read: load it by its name instead.")
    expected = architecture["pretrained_cfg"]
    model = _library("this model").create_model(architecture["architecture"], pretrained_cfg=expected, **arguments)
    return _body(model, architecture)


def _body(model: Any, config: dict[str, Any]) -> nn.Module:
    from crmatch.networks.pretrained.library_bodies import TimmBody

    # With num_classes=0 in create_model, timm would no longer complain about weights that do not fit.
    model.reset_classifier(0)
    return TimmBody(model, _multiple_of(config), _has_fixed_size(config))


def _config(source: str, directory: Path) -> dict[str, Any]:
    """config.json with `architecture`, `model_args` and `pretrained_cfg`; older files have everything in one object."""
    config = read_json(directory / "config.json")
    if "architecture" not in config:
        raise RequestError(f"timm:{source} is no model of timm: its config.json names no architecture.\nTry hf:{source}")
    expected = {key: value for key, value in config.get("pretrained_cfg", config).items() if key in INPUT_KEYS}
    if "num_classes" in config:
        expected["num_classes"] = config["num_classes"]
    return {"architecture": config["architecture"], "model_args": config.get("model_args", {}), "pretrained_cfg": expected}


def _patch_size(config: dict[str, Any]) -> int | None:
    """Of an architecture that takes all multiples of it as image size."""
    match = DYNAMIC_SIZE.match(config["architecture"])
    return config["model_args"].get("patch_size", int(match[1])) if match else None


def _options(config: dict[str, Any]) -> dict[str, Any]:
    return {"dynamic_img_size": True} if _patch_size(config) else {}


def _has_fixed_size(config: dict[str, Any]) -> bool:
    return bool(config["pretrained_cfg"].get("fixed_input_size")) and not _patch_size(config)


def _multiple_of(config: dict[str, Any]) -> int:
    """The patch size; the only image size of architectures with a fixed one (Swin); else 1."""
    only: int = config["pretrained_cfg"]["input_size"][-1] if _has_fixed_size(config) else 1
    return _patch_size(config) or only


def _repository(source: str) -> str:
    """`resnet18.a1_in1k` is timm/resnet18.a1_in1k on the Hub. timm knows the default weights of a name without tag."""
    if "/" in source:
        return source
    if "." in source:
        return f"timm/{source}"
    timm = _library(f"timm:{source}")
    expected = timm.get_pretrained_cfg(source)
    if not (expected and expected.hf_hub_id):
        near = difflib.get_close_matches(source, timm.list_models(pretrained=True), n=3)
        guess = f"Did you mean {', '.join(near)}? " if near else ""
        raise RequestError(
            f"timm:{source}: there is no such directory, and timm {timm.__version__} has no weights of that name.\n"
            f"{guess}All names: timm.list_models(pretrained=True)"
        )
    return str(expected.hf_hub_id)


def _library(name: str) -> Any:
    """The module `timm`. A torchvision that does not match torch fails with a RuntimeError."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        raise RequestError(
            f"{name} needs the library timm, which cannot be imported: {error}.\n"
            "pip install 'crmatch[timm]', and a torchvision that matches torch (https://pytorch.org/get-started/locally)"
        ) from error
    return timm
