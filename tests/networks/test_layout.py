"""One memory layout through the whole step: a mixture costs a seventh of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crmatch.networks.build import build_network
from crmatch.networks.config import NetworkConfig, ResNet18Config, WideResNetConfig

LAST = torch.channels_last


class Layouts(TorchDispatchMode):
    """Names of operations that were given feature maps in the other layout."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        maps = [value for value in args if isinstance(value, Tensor) and value.ndim == 4 and min(value.shape) > 1]
        if any(not value.is_contiguous(memory_format=LAST) for value in maps) and "contiguous" not in str(function):
            self.mixed.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "config",
    [WideResNetConfig(filters=8, repeat=1), ResNet18Config()],
    ids=["wide_resnet", "resnet18"],
)
def test_every_convolution_norm_and_activation_of_a_pass_and_its_gradient_sees_channels_last(
    config: NetworkConfig, channels: int
) -> None:
    network = build_network(config, channels=channels, image_size=32, classes=10).channels_last().train()
    with Layouts() as layouts:
        outputs = network(torch.randn(8, channels, 32, 32))
        flattened = outputs.feature_map.flatten(start_dim=1)
        (flattened.square().mean() + outputs.logits.logsumexp(dim=1).mean()).backward()
    heavy = ("convolution", "batch_norm", "relu", "pool")
    assert not [name for name in layouts.mixed if any(word in name for word in heavy)]
