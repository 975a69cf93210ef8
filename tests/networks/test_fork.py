"""Values that go two ways have the gradients autograd gives them."""

from __future__ import annotations

import pytest
import torch

from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from crmatch.networks.fork import forked, with_pooled


@pytest.mark.parametrize("stride", [1, 2])
def test_a_forks_gradient_is_the_sum_of_both_ways(stride: int) -> None:
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    inner, carried = forked(x, stride)
    assert torch.equal(inner, x)
    assert torch.equal(carried, x[:, :, ::stride, ::stride])
    weights, others = torch.randn_like(x), torch.randn_like(carried)
    ((inner * weights).sum() + (carried * others).sum()).backward()
    expected = weights.clone()
    expected[:, :, ::stride, ::stride] += others
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert weights.data_ptr() != x.grad.data_ptr()


@pytest.mark.parametrize("used", ["map", "means", "both"])
def test_the_gradient_of_map_and_means(used: str) -> None:
    x = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last).requires_grad_()
    feature_map, means = with_pooled(x)
    assert torch.allclose(means, x.mean(dim=(2, 3)))
    weights, others = torch.randn(4, 12), torch.randn(4, 3)
    expected = torch.zeros(4, 3, 2, 2)
    loss = torch.zeros(())
    if used != "means":
        loss = loss + (feature_map.flatten(1) * weights).sum()
        expected += weights.view(4, 3, 2, 2)
    if used != "map":
        loss = loss + (means * others).sum()
        expected += others[:, :, None, None] / 4
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


def test_gradients_that_others_use_are_not_changed() -> None:
    """A sum hands the same tensor to both of its terms."""
    x = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last).requires_grad_()
    other = torch.zeros_like(x).requires_grad_()
    feature_map, means = with_pooled(x)
    weights = torch.randn_like(x)
    (((feature_map + other) * weights).sum() + means.sum()).backward()
    assert other.grad is not None
    assert x.grad is not None
    assert torch.equal(other.grad, weights)
    assert torch.equal(x.grad, weights + 0.25)


def test_a_backbone_takes_any_gradient() -> None:
    """Also one whose pixels are all the same memory."""
    network = build_network(WideResNetConfig(filters=4, repeat=1), channels=3, image_size=16, classes=3).train()
    network.backbone(torch.randn(8, 3, 16, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.backbone.parameters())


def test_without_gradients_values_are_the_same() -> None:
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(forked(x, 2)[1], x[:, :, ::2, ::2])
    assert torch.allclose(with_pooled(x)[1], x.mean(dim=(2, 3)))
