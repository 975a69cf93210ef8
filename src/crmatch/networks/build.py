"""Building and initializing networks. Each module draws its weights from its own random stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from crmatch.errors import RequestError
from crmatch.networks.config import AnyNetwork, NamedNetwork, OwnNetworkConfig, PretrainedConfig
from crmatch.networks.fast import FastNet
from crmatch.networks.network import Network, NetworkShape, split_outputs
from crmatch.networks.pretrained.backbone import PretrainedBackbone
from crmatch.networks.resnet import NormedLinear, ResNet18, set_gains
from crmatch.networks.wide_resnet import WideResNet
from crmatch.own_code import find, short_name
from crmatch.randomness import generator


def build_network(
    config: AnyNetwork,
    *,
    channels: int,
    image_size: int,
    classes: int,
    unlabeled: int = 0,
    heads: Callable[[NetworkShape], Mapping[str, nn.Module]] = lambda shape: {},
    seed: int = 0,
    architecture: Mapping[str, Any] | None = None,
) -> Network:
    """A network with heads, its weights drawn from the streams `init/backbone`, `init/classifier`, `init/<head>`.

    So adding or removing a head changes no other weight, and the global random state stays as it is. A pretrained backbone
    comes with its weights, or without them if its `architecture` is given, because a trained model's weights are loaded next.
    """
    with _seeded(generator(seed, "init/backbone")):
        backbone = _BACKBONES[config.kind](config, channels, image_size, architecture)
    return assemble(backbone, config, channels, image_size, classes, unlabeled, heads, seed)


def assemble(
    backbone: nn.Module,
    config: AnyNetwork,
    channels: int,
    image_size: int,
    classes: int,
    unlabeled: int,
    heads: Callable[[NetworkShape], Mapping[str, nn.Module]],
    seed: int,
) -> Network:
    """`backbone` with a classifier and heads, all initialized but a backbone that brings its weights; see `build_network`."""
    feature_map, features = _output_shapes(backbone, channels, image_size)
    shape = NetworkShape(feature_map, classes, unlabeled, features)
    normed = getattr(config, "weight_norm", False)
    with _seeded(generator(seed, "init/classifier")):
        classifier = (NormedLinear if normed else nn.Linear)(shape.features, classes)
    with _seeded(generator(seed, "init/heads")):
        network = Network(backbone, classifier, heads(shape), normalize_features=config.normalize_features)
    network.map_size = feature_map[1:]
    if not isinstance(config, PretrainedConfig | OwnNetworkConfig):
        _initialize(backbone, generator(seed, "init/backbone"), glorot=False)
    for name, module in [("classifier", classifier), *network.heads.items()]:
        _initialize(module, generator(seed, f"init/{name}"), glorot=name == "classifier")
    if normed:
        set_gains(network)
    return network


@torch.no_grad()
def _output_shapes(backbone: nn.Module, channels: int, image_size: int) -> tuple[tuple[int, int, int], int]:
    """(D, h, w) of the feature map and the width of the pooled features, from a pass over one blank image."""
    backbone.eval()
    outputs = backbone(torch.zeros(1, channels, image_size, image_size))
    backbone.train()
    if isinstance(outputs, torch.Tensor) and outputs.ndim != 4:
        found = f"{type(backbone).__name__} maps images to a tensor of shape {tuple(outputs.shape)}"
        raise RequestError(f"{found}.\nIt must return a feature map (N, D, h, w); leave out pooling and classifier.")
    feature_map, features = split_outputs(outputs)
    depth, height, width = feature_map.shape[1:]
    return (depth, height, width), features.shape[1]


def _pretrained(config: PretrainedConfig, channels: int, image_size: int, architecture: Mapping[str, Any] | None) -> nn.Module:
    from crmatch.networks.pretrained.load import load_body

    return PretrainedBackbone(load_body(config.backbone, architecture), config, image_size)


def _own(config: OwnNetworkConfig, channels: int, image_size: int, architecture: Mapping[str, Any] | None) -> nn.Module:
    backbone = find(config.code)(channels)
    if not isinstance(backbone, nn.Module):
        found = f"{short_name(config.code)} returned {type(backbone).__name__}"
        raise RequestError(f"{found}.\nIt must return a torch.nn.Module that maps images to a feature map (N, D, h, w).")
    return backbone


_BACKBONES: dict[str, Callable[[Any, int, int, Mapping[str, Any] | None], nn.Module]] = {
    "wide_resnet": lambda config, channels, image_size, architecture: WideResNet(config, channels),
    "resnet18": lambda config, channels, image_size, architecture: ResNet18(config, channels),
    "fast": lambda config, channels, image_size, architecture: FastNet(config, channels),
    "pretrained": _pretrained,
    "own": _own,
}


def weight_shapes(config: NamedNetwork, channels: int) -> dict[str, torch.Size]:
    """Shapes of a backbone's weights in the network's state, without the memory that the weights would take."""
    with torch.device("meta"):
        weights = _BACKBONES[config.kind](config, channels, 0, None).state_dict()
    return {f"backbone.{name}": weight.shape for name, weight in weights.items()}


@contextmanager
def _seeded(randomness: torch.Generator) -> Iterator[None]:
    """Let modules initialize themselves from `randomness` through torch's global CPU generator, which is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(randomness.initial_seed())
        yield


@torch.no_grad()
def _initialize(module: nn.Module, randomness: torch.Generator, glorot: bool) -> None:
    """He (fan out) for convolutions, Glorot for the classifier, PyTorch's uniform rule for other linear layers.

    Layers of other kinds keep the weights that their constructor drew.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            fan_out = layer.kernel_size[0] * layer.kernel_size[1] * layer.out_channels
            layer.weight.normal_(0, math.sqrt(2 / fan_out), generator=randomness)
            if layer.bias is not None:
                layer.bias.zero_()
        elif isinstance(layer, nn.Linear):
            if glorot:
                layer.weight.normal_(0, math.sqrt(2 / (layer.in_features + layer.out_features)), generator=randomness)
            else:
                layer.weight.uniform_(-1 / math.sqrt(layer.in_features), 1 / math.sqrt(layer.in_features), generator=randomness)
            if layer.bias is not None and glorot:
                layer.bias.zero_()
            elif layer.bias is not None:
                layer.bias.uniform_(-1 / math.sqrt(layer.in_features), 1 / math.sqrt(layer.in_features), generator=randomness)
