"""Building and initializing networks. Each module draws its weights from its own random stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crmatch.networks.config import ResNet18Config, WideResNetConfig
from crmatch.networks.network import Network, NetworkShape
from crmatch.networks.resnet import NormedLinear, ResNet18, set_gains
from crmatch.networks.wide_resnet import WideResNet
from crmatch.randomness import generator


def build_network(
    config: WideResNetConfig | ResNet18Config,
    *,
    channels: int,
    image_size: int,
    classes: int,
    unlabeled: int = 0,
    heads: Callable[[NetworkShape], Mapping[str, nn.Module]] = lambda shape: {},
    seed: int = 0,
) -> Network:
    """A network with heads, its weights drawn from the streams `init/backbone`, `init/classifier`, `init/<head>`.

    So adding or removing a head changes no other weight, and the global random state stays as it is.
    """
    with _seeded(generator(seed, "init/backbone")):
        backbone: nn.Module
        backbone = WideResNet(config, channels) if isinstance(config, WideResNetConfig) else ResNet18(config, channels)
    shape = NetworkShape(feature_map_shape(backbone, channels, image_size), classes, unlabeled)
    with _seeded(generator(seed, "init/classifier")):
        normed = isinstance(config, ResNet18Config) and config.weight_norm
        classifier = (NormedLinear if normed else nn.Linear)(shape.features, classes)
    with _seeded(generator(seed, "init/heads")):
        network = Network(backbone, classifier, heads(shape), normalize_features=config.normalize_features)
    for name, module in [("backbone", backbone), ("classifier", classifier), *network.heads.items()]:
        _initialize(module, generator(seed, f"init/{name}"), glorot=name == "classifier")
    set_gains(network)
    return network


@torch.no_grad()
def feature_map_shape(backbone: nn.Module, channels: int, image_size: int) -> tuple[int, int, int]:
    """(D, h, w) of the feature map, from a pass over one blank image."""
    backbone.eval()
    feature_map: Tensor = backbone(torch.zeros(1, channels, image_size, image_size))
    backbone.train()
    depth, height, width = feature_map.shape[1:]
    return depth, height, width


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
