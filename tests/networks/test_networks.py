from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import nn

from crmatch.methods import build_method
from crmatch.networks.build import build_network
from crmatch.networks.config import NETWORKS, ResNet18Config, WideResNetConfig
from crmatch.networks.ema import MovingAverage
from crmatch.networks.network import Network, NetworkShape, forward_together


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def network_of(
    config: WideResNetConfig | ResNet18Config, size: int, classes: int, method: str = "crmatch", **keys: object
) -> Network:
    heads = build_method(method, keys).heads
    return build_network(config, channels=3, image_size=size, classes=classes, heads=heads)


TINY = WideResNetConfig(filters=4, repeat=1)
STL10_STRIDE_2 = NETWORKS["wrn-37-2"].model_copy(update={"first_stride": 2})


# The papers' networks: network, image size, classes, parameters with and without convolution biases, (a), z, h.
PUBLISHED = [
    (NETWORKS["wrn-28-2"], 32, 10, 1_469_642, 1_467_610, (128, 8, 8), 1_048_704, 17_028),
    (NETWORKS["wrn-28-2"], 32, 100, 1_481_252, 1_479_220, (128, 8, 8), 1_048_704, 17_028),
    (NETWORKS["wrn-28-8"], 32, 100, 26_033_980, 26_025_459, (540, 8, 8), 18_662_940, 294_304),
    (NETWORKS["wrn-28-8-128"], 32, 100, 23_409_092, 23_401_012, (512, 8, 8), 16_777_728, 264_708),
    (NETWORKS["wrn-37-2"], 96, 10, 5_933_770, 5_929_434, (256, 12, 12), 9_437_440, 66_820),
    (STL10_STRIDE_2, 96, 10, 5_933_770, 5_929_434, (256, 6, 6), 2_359_552, 66_820),
    (NETWORKS["resnet-18"], 84, 100, 11_227_812, None, (512, 3, 3), 2_359_808, 264_708),
]


@pytest.mark.parametrize(("config", "size", "classes", "total", "without_bias", "shape", "z", "h"), PUBLISHED)
def test_parameters_and_feature_maps_equal_the_published_ones(
    config: WideResNetConfig | ResNet18Config,
    size: int,
    classes: int,
    total: int,
    without_bias: int | None,
    shape: tuple[int, int, int],
    z: int,
    h: int,
) -> None:
    with torch.device("meta"):  # shapes without values
        network = network_of(config, size, classes)
        outputs = network.eval()(torch.zeros(2, 3, size, size))
        bare, usb = (
            network_of(config.model_copy(update=changes), size, classes)
            for changes in ({"conv_bias": "none"}, {"conv_bias": "stem", "block": "usb"})
        )
    assert count(network.backbone) + count(network.classifier) == total
    assert count(network.heads["projection"]) == z
    assert count(network.heads["rotation"]) == h
    assert outputs.feature_map.shape == (2, *shape)
    assert outputs.features.shape == (2, shape[0])
    assert outputs.logits.shape == (2, classes)
    if without_bias is not None:
        assert count(bare.backbone) + count(bare.classifier) == without_bias
        assert count(usb.backbone) + count(usb.classifier) == without_bias + 16


def test_resnet_18_backbone_alone_has_the_published_count() -> None:
    assert count(network_of(NETWORKS["resnet-18"], 84, 100).backbone) == 11_176_512


def test_the_usual_reading_of_96_pixels_would_be_the_misprint_of_23_8_million() -> None:
    with torch.device("meta"):
        trap = network_of(WideResNetConfig(filters=32, scales=5), 96, 10)
    assert count(trap.backbone) + count(trap.classifier) == 23_774_922


def test_a_first_block_that_only_shrinks_the_image_has_a_shortcut_too() -> None:
    network = network_of(WideResNetConfig(filters=16, repeat=2, first_stride=2), 32, 10)
    assert network(torch.zeros(2, 3, 32, 32)).feature_map.shape == (2, 64, 4, 4)
    assert [block.shortcut is not None for block in network.backbone.blocks] == [True, False] * 3


def test_only_the_very_first_block_adds_its_activated_input() -> None:
    network = network_of(NETWORKS["wrn-28-2"], 32, 10)
    flags = [block.activate_before_skip for block in network.backbone.blocks]
    assert flags == [True] + [False] * 11


def reference_wide_resnet(network: Network, images: torch.Tensor, slope: float = 0.1) -> torch.Tensor:
    """Wide ResNet written out with functional calls, training-mode statistics."""

    def norm(x: torch.Tensor, layer: nn.BatchNorm2d) -> torch.Tensor:
        mean, variance = x.mean(dim=(0, 2, 3), keepdim=True), x.var(dim=(0, 2, 3), unbiased=False, keepdim=True)
        y = (x - mean) / (variance + 1e-3).sqrt() * layer.weight[:, None, None] + layer.bias[:, None, None]
        return torch.where(y > 0, y, slope * y)

    def conv(x: torch.Tensor, layer: nn.Conv2d) -> torch.Tensor:
        return torch.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding)

    x = conv(images, network.backbone.stem)
    for number, block in enumerate(network.backbone.blocks):
        t = norm(x, block.norm1)
        if number == 0:
            x = t
        r = conv(norm(conv(t, block.conv1), block.norm2), block.conv2)
        if block.shortcut is not None:
            stride = 2 if number >= 2 and number % 2 == 0 else 1
            x = torch.conv2d(x, block.shortcut.weight, block.shortcut.bias, stride)
        x = x + r
    return norm(x, network.backbone.norm).mean(dim=(2, 3))


@pytest.mark.parametrize("filters", [4, 16])
def test_the_wide_resnet_equals_the_specification_written_out(filters: int) -> None:
    network = network_of(WideResNetConfig(filters=filters, repeat=2), 16, 3).double().train()
    images = torch.randn(5, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network(images).features, reference_wide_resnet(network, images), rtol=1e-9, atol=1e-9)


def test_the_usb_block_feeds_the_raw_input_where_the_width_changes_after_stage_1() -> None:
    network = network_of(TINY.model_copy(update={"block": "usb"}), 16, 3)
    assert [block.omit_norm1 for block in network.backbone.blocks] == [False, True, True]


def test_initial_weights_follow_the_published_rule() -> None:
    network = network_of(NETWORKS["wrn-28-2"], 32, 10)
    conv = network.backbone.blocks[-1].conv2
    assert abs(conv.weight.std().item() / math.sqrt(2 / (9 * 128)) - 1) < 0.02
    assert not conv.bias.any()
    assert abs(network.classifier.weight.std().item() / math.sqrt(2 / 138) - 1) < 0.1
    assert not network.classifier.bias.any()
    projection = network.heads["projection"]
    bound = 1 / math.sqrt(8192)
    assert 0.99 * bound < projection.weight.abs().max() <= bound
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.momentum, norm.eps) for norm in norms} == {(0.001, 1e-3)}


def test_a_head_more_or_less_moves_no_other_weight_and_no_global_state() -> None:
    before = torch.get_rng_state()
    full = network_of(TINY, 16, 3).state_dict()
    bare = network_of(TINY, 16, 3, "fixmatch").state_dict()
    no_rotation = network_of(TINY, 16, 3, rotation_weight=0).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert len(bare) < len(no_rotation) < len(full)
    for state in (bare, no_rotation):
        assert all(torch.equal(full[name], tensor) for name, tensor in state.items())


def test_another_seed_gives_other_weights() -> None:
    first, second = (build_network(TINY, channels=1, image_size=8, classes=2, seed=seed) for seed in (0, 1))
    assert not torch.equal(first.classifier.weight, second.classifier.weight)


def test_forward_together_equals_one_pass_over_the_concatenation() -> None:
    network = network_of(TINY, 16, 3).train()
    views = {name: torch.randn(size, 3, 16, 16) for name, size in (("labeled", 2), ("weak", 3), ("strong", 4))}
    together = forward_together(network, views)
    joint = network(torch.cat(list(views.values())))
    assert list(together) == list(views)
    assert torch.equal(torch.cat([outputs.logits for outputs in together.values()]), joint.logits)
    assert [len(outputs.feature_map) for outputs in together.values()] == [2, 3, 4]


@pytest.mark.parametrize("warmup", [False, True, "mean"])
def test_the_moving_average_follows_its_formula_and_copies_buffers(warmup: bool | Literal["mean"]) -> None:
    network = network_of(TINY, 16, 3).train()
    average = MovingAverage(network, decay=0.9, warmup=warmup)
    expected = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    for step in range(4):
        network(torch.randn(8, 3, 16, 16))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter))
        average.update(network, step)
        decay = {False: 0.9, True: min(0.9, (1 + step) / (10 + step)), "mean": min(0.9, 1 - 1 / (step + 1))}[warmup]
        for name, parameter in network.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach()
    for name, parameter in average.network.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)
        assert not parameter.requires_grad
    raw = dict(network.named_buffers())
    assert all(torch.equal(buffer, raw[name]) for name, buffer in average.network.named_buffers())
    assert any(name.endswith("running_mean") for name in raw)


def test_deployed_state_has_no_training_heads() -> None:
    assert not any("head" in name for name in network_of(TINY, 16, 3).deployed_state())


def test_heads_with_layers_of_any_kind_are_initialized_from_the_seed_and_leave_the_global_generator_alone() -> None:
    def heads(shape: NetworkShape) -> dict[str, nn.Module]:
        layers = [nn.LayerNorm(shape.features), nn.Embedding(50, shape.features), nn.Linear(shape.features, 2, bias=False)]
        return {"odd": nn.ModuleList([*layers, nn.GroupNorm(2, shape.features)])}

    config = WideResNetConfig(filters=4, repeat=1)
    state = torch.get_rng_state()
    first, second, other = (
        build_network(config, channels=3, image_size=8, classes=3, heads=heads, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in first.state_dict().items():
        assert value.isfinite().all(), name
        assert torch.equal(value, second.state_dict()[name]), name
    norm, embedding, linear = (first.heads["odd"][place].weight for place in range(3))
    assert torch.equal(norm, torch.ones_like(norm))
    assert 0.8 < embedding.std() < 1.2
    assert not torch.equal(linear, other.heads["odd"][2].weight)
    assert not torch.equal(embedding, other.heads["odd"][1].weight)
