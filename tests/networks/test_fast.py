from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from conftest import experiment_of, tiny_spec
from crmatch.networks.build import build_network
from crmatch.networks.config import FastNetConfig
from crmatch.networks.fast import FastNet
from crmatch.runs.cost import network_layers
from reference.whitening import patches_of, second_moments


def test_the_first_layer_whitens_patches() -> None:
    images = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(0)).cumsum(3)  # neighbors are correlated
    backbone = FastNet(FastNetConfig(filters=4), channels=2)
    backbone.prepare(images)
    kernels = backbone.whitening.double().flatten(1).numpy()
    half = len(kernels) // 2
    np.testing.assert_array_equal(kernels[:half], -kernels[half:])
    # W M W^T = V / (V + epsilon): uncorrelated, with a variance just below 1.
    values = np.linalg.eigvalsh(second_moments(images.numpy()))
    np.testing.assert_allclose(
        kernels[:half] @ second_moments(images.numpy()) @ kernels[:half].T, np.diag(values / (values + 5e-4)), atol=1e-5
    )
    outputs = F.conv2d(images, backbone.whitening).permute(0, 2, 3, 1).flatten(0, 2)
    np.testing.assert_allclose(outputs, patches_of(images.numpy()) @ kernels.T, atol=1e-5)


@pytest.mark.parametrize(("size", "channels", "shape"), [
    (8, 1, (16, 1, 1)), (16, 1, (16, 1, 1)), (24, 3, (16, 2, 2)), (32, 3, (16, 3, 3)), (224, 3, (16, 27, 27)),
])  # fmt: skip
def test_sizes_from_8_to_224_gray_and_color(size: int, channels: int, shape: tuple[int, int, int]) -> None:
    config = FastNetConfig(filters=4)
    network = build_network(config, channels=channels, image_size=size, classes=3)
    outputs = network(torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0)))
    assert outputs.feature_map.shape[1:] == shape
    kernels = [parameter for parameter in network.backbone.parameters() if parameter.ndim == 4]
    layers = network_layers(config, channels, size)
    assert layers[0].weights == network.backbone.whitening.numel()
    assert sum(layer.weights for layer in layers[1:]) == sum(kernel.numel() for kernel in kernels)
    assert (layers[-1].channels, layers[-1].pixels) == (shape[0], shape[1] * shape[2])


def test_the_first_layer_depends_on_the_training_images_and_is_not_trained(stripes: Path) -> None:
    spec = tiny_spec(stripes, network={"kind": "fast", "filters": 4})
    training = experiment_of(spec, stripes).training()
    before = training.network.backbone.whitening.clone()
    assert not torch.equal(before, FastNet(spec.network, channels=before.shape[1]).whitening)
    training.take_step()
    assert torch.equal(training.network.backbone.whitening, before)
    assert torch.equal(training.ema.network.backbone.whitening, before)
