"""Networks by name and their options. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from crmatch.errors import unknown_name_error
from crmatch.own_code import code_in_file, is_reference
from crmatch.strict_model import StrictModel

SLICE_BYTES = 4 * 2**20
"""Size of a norm's input in one slice of a batch; see `low_memory/norm_act_conv.py`."""


class WideResNetConfig(StrictModel):
    """The Wide ResNet of MixMatch's and FixMatch's code: `scales` stages of `repeat` blocks with `filters` * 2^s channels."""

    kind: Literal["wide_resnet"] = "wide_resnet"
    filters: int = Field(32, ge=1, le=4096)
    scales: int = Field(3, ge=1, le=6)
    repeat: int = Field(4, ge=1, le=64)
    first_stride: Literal[1, 2] = 1
    block: Literal["preactivation", "usb"] = "preactivation"
    """`usb` skips the first norm of a block that changes the width, as USB's code does."""
    conv_bias: Literal["all", "stem", "none"] = "all"
    slope: float = Field(0.1, ge=0, lt=1)
    norm_momentum: float = Field(0.001, gt=0, le=1)
    norm_epsilon: float = Field(1e-3, gt=0)
    block_norm_epsilon: float = Field(1e-3, gt=0)
    """Epsilon of the batch norms inside blocks; USB has 1e-5 there and 1e-3 in the last one."""
    normalize_features: bool = False
    """L2-normalize the pooled features before the classifier (deep label propagation)."""


class ResNet18Config(StrictModel):
    """The plain ResNet-18 with a 7x7 stem, for mini-ImageNet."""

    kind: Literal["resnet18"] = "resnet18"
    norm_momentum: float = Field(0.1, gt=0, le=1)
    norm_epsilon: float = Field(1e-5, gt=0)
    normalize_features: bool = False
    """L2-normalize the pooled features before the classifier (deep label propagation)."""
    weight_norm: bool = False
    """Weight normalization of all convolutions and the classifier (PLCB)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout between the two convolutions of each block (PLCB: 0.1)."""


class FastNetConfig(StrictModel):
    """A shallow, wide network for minutes of training on a CPU: three blocks with f, 4 f and 4 f channels, f = `filters`."""

    kind: Literal["fast"] = "fast"
    filters: int = Field(32, ge=1, le=4096)
    norm_momentum: float = Field(0.1, gt=0, le=1)
    norm_epsilon: float = Field(1e-5, gt=0)
    normalize_features: bool = False
    """L2-normalize the pooled features before the classifier (deep label propagation)."""


class PretrainedConfig(StrictModel):
    """A pretrained backbone, by its name in `networks/pretrained/catalog.py`."""

    kind: Literal["pretrained"] = "pretrained"
    backbone: str = "efficientnet-lite0"
    weights: str | None = None
    """First 16 hex digits of the sha256 of the weights, so that other weights are another run."""
    train: Literal["head", "all"] = "head"
    """`head` trains a linear classifier on features that are computed once; `all` trains the whole network."""
    weak_views: int = Field(2, ge=1, le=64)
    """Stored weak views of each image; only for `head`."""
    strong_views: int = Field(4, ge=1, le=64)
    """Stored strong views of each image; only for `head`."""
    freeze_norm: bool = True
    """Keep the pretrained running statistics of batch norms; only for `all`."""
    size_chosen: bool = False
    """Whether time and cross-validation chose `data.image_size`; the name of the run then does not contain it."""
    frozen_share: float = Field(0.0, ge=0, lt=1)
    """Share of the backbone's parameter tensors, counted from the input, that are not trained; only for `all`."""
    normalize_features: bool = False


class OwnNetworkConfig(StrictModel):
    """A network from outside the package: a function (channels) -> module that maps images to a feature map (N, D, h, w)."""

    kind: Literal["own"] = "own"
    code: str
    """The function, and a checksum of its file: `mine.py:make_network#1a2b3c4d`."""
    normalize_features: bool = False


AnyNetwork = WideResNetConfig | ResNet18Config | FastNetConfig | PretrainedConfig | OwnNetworkConfig
NetworkConfig = Annotated[AnyNetwork, Field(discriminator="kind")]
NamedNetwork = WideResNetConfig | ResNet18Config | FastNetConfig
NETWORKS: dict[str, NamedNetwork] = {
    "wrn-28-2": WideResNetConfig(filters=32),
    "wrn-28-8": WideResNetConfig(filters=135),
    "wrn-28-8-128": WideResNetConfig(filters=128),
    "wrn-37-2": WideResNetConfig(filters=32, scales=4),
    "resnet-18": ResNet18Config(),
    "fast": FastNetConfig(),
}


def find_network(name: str) -> NamedNetwork | OwnNetworkConfig:
    """The network `name`, or the one that the function `path/mine.py:function` makes."""
    if is_reference(name):
        return OwnNetworkConfig(code=code_in_file(name))
    if name not in NETWORKS:
        raise unknown_name_error("network", name, [*NETWORKS, "path/mine.py:function"])
    return NETWORKS[name]
