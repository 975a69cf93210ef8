"""The lean norm_act_conv computes what norm, activation and conv compute, and stores half of it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.batch_norm import forward_without_bn_update
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from crmatch.networks.low_memory import norm_act_conv as module
from crmatch.networks.low_memory.norm_act_conv import norm_act_conv


def plain(x: Tensor, norm: nn.BatchNorm2d, slope: float, conv: nn.Conv2d, residual: Tensor | None) -> Tensor:
    outputs: Tensor = conv(F.leaky_relu(norm(x), slope))
    return outputs if residual is None else residual + outputs


@pytest.mark.parametrize("slice_bytes", [2**20, 1], ids=["whole", "slices"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_values_gradients_and_running_statistics_are_those_of_the_three_layers(
    slice_bytes: int,
    stride: int,
    bias: bool,
    has_residual: bool,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", slice_bytes)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=0.1, dtype=dtype)
    conv = nn.Conv2d(4, 8, 3, stride, padding=1, bias=bias, dtype=dtype)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.uniform_(norm.bias, -1, 1)
    x = torch.randn(21, 4, 9, 9, dtype=dtype) * 3 + 7
    weights = torch.randn(21, 8, -(-9 // stride), -(-9 // stride), dtype=dtype)
    results = []
    for function in (partial(norm_act_conv, lean=True), plain):
        own_norm, own_conv, inputs = copy.deepcopy(norm), copy.deepcopy(conv), x.clone().requires_grad_()
        residual = weights.clone().requires_grad_() if has_residual else None
        outputs = function(inputs, own_norm, 0.1, own_conv, residual)
        (outputs * weights).sum().backward()
        modules = (own_norm, own_conv)
        gradients = [parameter.grad for module in modules for parameter in module.parameters()]
        gradients += [residual.grad] if residual is not None else []
        results.append([outputs, inputs.grad, *gradients, *own_norm.buffers()])
    for lean, reference in zip(*results, strict=True):
        assert lean is not None
        assert reference is not None
        assert (lean - reference).abs().max() <= tolerance * reference.abs().max()


def test_a_batch_is_cut_where_threads_share_evenly_and_nothing_is_left_out() -> None:
    x = torch.empty(300, 32, 32, 32)
    assert [len(x[rows]) for rows in module._slices(x)] == [32, 32, 32, 32, 32, 32, 32, 32, 32, 12]
    assert module._slices(x[:2, :1]) == [slice(0, 1024)]


def test_passes_that_leave_running_statistics_alone_do_so_here_too() -> None:
    network = build_network(WideResNetConfig(filters=4, repeat=1), channels=3, image_size=8, classes=3)
    network.save_memory(lean=True)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    forward_without_bn_update(network, torch.randn(4, 3, 8, 8)).logits.sum().backward()
    assert all(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())
    network.train()(torch.randn(4, 3, 8, 8))
    assert not any(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())


def kept_values(norm: nn.BatchNorm2d, conv: nn.Conv2d, x: Tensor, lean: bool) -> int:
    """Values of all tensors that the backward pass would read, each memory counted once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = norm_act_conv(x, norm, 0.1, conv, lean=lean)
    assert outputs.requires_grad
    return sum(kept.values())


def test_one_feature_map_is_kept_instead_of_two() -> None:
    norm, conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
    x = torch.randn(16, 8, 16, 16, requires_grad=True)
    assert x.numel() <= kept_values(norm, conv, x, lean=True) < 1.1 * x.numel()
    assert 2 * x.numel() <= kept_values(norm, conv, x, lean=False) < 2.1 * x.numel()
