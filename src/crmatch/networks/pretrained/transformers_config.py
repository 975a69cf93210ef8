"""What the JSON files of a `transformers` model say about its input. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from crmatch.errors import DataError, RequestError, unknown_name_error
from crmatch.networks.pretrained.catalog import BackboneInput
from crmatch.networks.pretrained.model_directory import read_json


class Family(NamedTuple):
    """What must be known about a model type beyond its config.json.

    Attributes:
        class_tokens: tokens before the register and patch tokens.
        patch_size: if config.json does not say; image sizes must be a multiple of it. 1 for convolutional networks.
        interpolate: the model takes other sizes than its own only with interpolate_pos_encoding=True.
    """

    class_tokens: int = 0
    patch_size: int = 1
    interpolate: bool = False


FAMILIES = {
    "clip_vision_model": Family(class_tokens=1, patch_size=32, interpolate=True),
    "convnext": Family(),
    "convnextv2": Family(),
    "dinov2": Family(class_tokens=1, patch_size=14),
    "dinov2_with_registers": Family(class_tokens=1, patch_size=16),
    "dinov3_convnext": Family(class_tokens=1),  # returns its map as tokens, with their mean as class token
    "dinov3_vit": Family(class_tokens=1, patch_size=16),
    "efficientnet": Family(),
    "mobilenet_v2": Family(),
    "resnet": Family(),
    "siglip_vision_model": Family(patch_size=16, interpolate=True),
    "swin": Family(patch_size=4, interpolate=True),
    "vit": Family(class_tokens=1, patch_size=16, interpolate=True),
}
"""The supported values of `model_type` in config.json."""


def read_config(name: str, directory: Path) -> dict[str, Any]:
    """config.json of a supported model; of CLIP and SigLIP, the part about the vision tower."""
    config = read_json(directory / "config.json")
    if "architecture" in config:
        raise RequestError(f"{name} is a model of timm.\nUse timm:{name.removeprefix('hf:')}")
    if config.get("model_type") in ("clip", "siglip"):
        config = {"model_type": f"{config['model_type']}_vision_model", **config["vision_config"]}
    if config.get("model_type") not in FAMILIES:
        raise unknown_name_error(f"model type in config.json of {name}:", str(config.get("model_type")), FAMILIES)
    return config


def patch_size(config: dict[str, Any]) -> int:
    """Image sizes must be a multiple of this."""
    family = FAMILIES[config["model_type"]]
    return int(config.get("patch_size", family.patch_size)) if family.patch_size > 1 else 1


def read_input(name: str, directory: Path) -> BackboneInput:
    """What the model expects of its input.

    The library computes (pixel * factor - offset - mean) / std for pixels of 0..255; here, pixels are scaled to 0..1.
    """
    config = read_config(name, directory)
    processor = _read_processor(name, directory)
    scale = 255 * processor.get("rescale_factor", 1 / 255)
    offset = 1 if processor.get("rescale_offset") else 0
    mean = [(value + offset) / scale for value in processor["image_mean"]]
    std = [value / scale for value in processor["image_std"]]
    if config["model_type"] == "efficientnet" and processor.get("include_top", True):  # divides by std twice
        std = [value * again for value, again in zip(std, processor["image_std"], strict=True)]
    crop = processor.get("crop_size") if processor.get("do_center_crop", True) else None
    size = _side(crop) or _side(processor.get("size")) or _side(config.get("image_size")) or 224
    return BackboneInput(size, tuple(mean), tuple(std), patch_size(config))


def _side(size: Any) -> int | None:
    """Of a square given as 224, [224, 224], {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge")
    side: int | None = size[0] if isinstance(size, list) else size
    return side


def _read_processor(name: str, directory: Path) -> dict[str, Any]:
    """How images are prepared. Newer versions of the library write processor_config.json for CLIP and SigLIP."""
    for file in (directory / "preprocessor_config.json", directory / "processor_config.json"):
        if file.is_file():
            content = read_json(file)
            processor: dict[str, Any] = content.get("image_processor", content)
            if "image_mean" in processor and "image_std" in processor:
                return processor
    raise DataError(
        f"{name}: no preprocessor_config.json in {directory} with the mean and standard deviation of its input.\n"
        "Copy that file from the original model, or write it with save_pretrained of its image processor"
    )
