"""Building and initializing networks; each module draws its weights from a stream of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn

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

    So a head more or less moves no other weight, and nothing touches the global random state.
    """
    with torch.device("meta"):
        backbone: WideResNet | ResNet18
        backbone = WideResNet(config, channels) if isinstance(config, WideResNetConfig) else ResNet18(config, channels)
        side = image_size
        for _ in range(backbone.halvings):
            side = math.ceil(side / 2)
        shape = NetworkShape((backbone.out_channels, side, side), classes, unlabeled)
        normed = isinstance(config, ResNet18Config) and config.weight_norm
        classifier = (NormedLinear if normed else nn.Linear)(shape.features, classes)
    for made in (backbone, classifier):
        _allocate(made)
    with torch.random.fork_rng(devices=[]):  # heads may hold running state with values, so they are made in full
        network = Network(backbone, classifier, heads(shape), normalize_features=config.normalize_features)
    for name, module in [("backbone", backbone), ("classifier", classifier), *network.heads.items()]:
        _initialize(module, generator(seed, f"init/{name}"), glorot=name == "classifier")
    set_gains(network)
    return network


def _allocate(module: nn.Module) -> None:
    """Give `module`, made on the device `meta`, memory. Not by `to_empty`, which imports sympy: a second, and 30 MiB."""
    for part in module.modules():
        for name, parameter in [*part.named_parameters(recurse=False)]:
            memory = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(part, name, nn.Parameter(memory, parameter.requires_grad))
        for name, buffer in [*part.named_buffers(recurse=False)]:
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))


@torch.no_grad()
def _initialize(module: nn.Module, randomness: torch.Generator, glorot: bool) -> None:
    """He (fan out) for convolutions, Glorot for the classifier, PyTorch's uniform rule for other linear layers."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            fan_out = part.kernel_size[0] * part.kernel_size[1] * part.out_channels
            part.weight.normal_(0, math.sqrt(2 / fan_out), generator=randomness)
            if part.bias is not None:
                part.bias.zero_()
        elif isinstance(part, nn.BatchNorm2d):
            part.reset_parameters()
        elif isinstance(part, nn.Linear) and glorot:
            part.weight.normal_(0, math.sqrt(2 / (part.in_features + part.out_features)), generator=randomness)
            part.bias.zero_()
        elif isinstance(part, nn.Linear):
            bound = 1 / math.sqrt(part.in_features)
            part.weight.uniform_(-bound, bound, generator=randomness)
            cast(torch.Tensor, part.bias).uniform_(-bound, bound, generator=randomness)
