"""Options of networks that single methods bring: normalized features, normalized weights, dropout from a generator."""

from __future__ import annotations

import copy

import pytest
import torch

from crmatch.networks.build import build_network
from crmatch.networks.config import ResNet18Config, WideResNetConfig
from crmatch.networks.dropout import Dropout, dropout_from
from crmatch.networks.network import Network
from crmatch.networks.resnet import NormedConv2d, NormedLinear

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def resnet(**options: float) -> Network:
    return build_network(ResNet18Config(**options), channels=3, image_size=32, classes=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config", [ResNet18Config(normalize_features=True), WideResNetConfig(filters=4, normalize_features=True)]
)
def test_normalized_features_have_length_one_and_feed_the_classifier(config: ResNet18Config | WideResNetConfig) -> None:
    network = build_network(config, channels=3, image_size=32, classes=5)
    outputs = network(IMAGES)
    torch.testing.assert_close(outputs.features.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(outputs.logits, network.classifier(outputs.features))
    pooled = outputs.feature_map.mean(dim=(2, 3))
    torch.testing.assert_close(outputs.features, pooled / pooled.norm(dim=1, keepdim=True))


def test_a_weight_normalized_network_starts_as_the_plain_one() -> None:
    plain, normed = resnet().eval(), resnet(weight_norm=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(normed(IMAGES).logits, plain(IMAGES).logits, rtol=1e-4, atol=1e-5)
    layers = [module for module in normed.modules() if isinstance(module, NormedConv2d | NormedLinear)]
    assert len(layers) == 21


def test_only_the_gain_changes_the_length_of_a_normalized_kernel() -> None:
    torch_layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 3))
    layer = NormedLinear(6, 3)
    with torch.no_grad():
        layer.weight.copy_(torch_layer.parametrizations.weight.original1)  # type: ignore[union-attr, index]
        layer.gain.copy_(torch_layer.parametrizations.weight.original0[:, 0])  # type: ignore[union-attr, index]
        layer.bias.copy_(torch_layer.bias)
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(layer(inputs), torch_layer(inputs))
        before = layer(inputs)
        layer.weight.mul_(3)
        torch.testing.assert_close(layer(inputs), before)


def test_a_normed_network_can_be_copied_and_its_state_loaded() -> None:
    network = resnet(weight_norm=True)
    twin = copy.deepcopy(network)
    twin.load_state_dict(network.state_dict())
    with torch.no_grad():
        assert torch.equal(network.eval()(IMAGES).logits, twin.eval()(IMAGES).logits)


def test_dropout_drops_its_share_from_the_generator_and_nothing_elsewhere() -> None:
    dropout, ones = Dropout(0.25), torch.ones(100, 100)
    state = torch.get_rng_state()
    assert torch.equal(dropout(ones), ones)
    with dropout_from(dropout, torch.Generator().manual_seed(0)):
        dropped = dropout(ones)
        with dropout_from(dropout, None):
            assert torch.equal(dropout(ones), ones)
        assert not torch.equal(dropout(ones), dropped)
        assert torch.equal(dropout.eval()(ones), ones)
        dropout.train()
    assert torch.equal(dropout(ones), ones)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert 0.23 < float((dropped == 0).float().mean()) < 0.27
    with dropout_from(dropout, torch.Generator().manual_seed(0)):
        assert torch.equal(dropout(ones), dropped)
    assert torch.equal(state, torch.get_rng_state())


def test_a_network_with_dropout_differs_in_training_with_a_generator_only() -> None:
    network = resnet(dropout=0.5)
    with torch.no_grad():
        plain = network(IMAGES).features
        with dropout_from(network, torch.Generator().manual_seed(0)):
            assert not torch.equal(network(IMAGES).features, plain)
        network.eval()
        still = network(IMAGES).features
        with dropout_from(network, torch.Generator().manual_seed(0)):
            assert torch.equal(network(IMAGES).features, still)
