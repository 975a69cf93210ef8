"""The lean convolution computes what norm, activation and convolution do one after the other, and keeps half of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.batch_norm import forward_without_bn_update
from crmatch.networks.build import build_network
from crmatch.networks.config import WideResNetConfig
from crmatch.networks.low_memory import norm_act_conv as lean_convolution
from crmatch.networks.low_memory.norm_act_conv import activated, convolved, convolved_as_is


def plain(x: Tensor, norm: nn.BatchNorm2d, slope: float, convolution: nn.Conv2d, carried: Tensor | None) -> Tensor:
    outputs: Tensor = convolution(F.leaky_relu(norm(x), slope))
    return outputs if carried is None else carried + outputs


@pytest.mark.parametrize("part_bytes", [2**20, 1], ids=["whole", "parts"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_values_gradients_and_running_statistics_are_those_of_the_three_layers(
    part_bytes: int,
    stride: int,
    bias: bool,
    carries: bool,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lean_convolution, "PART_BYTES", part_bytes)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=0.1, dtype=dtype)
    convolution = nn.Conv2d(4, 8, 3, stride, padding=1, bias=bias, dtype=dtype)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.uniform_(norm.bias, -1, 1)
    x = torch.randn(21, 4, 9, 9, dtype=dtype) * 3 + 7
    weights = torch.randn(21, 8, -(-9 // stride), -(-9 // stride), dtype=dtype)
    results = []
    for function in (convolved, plain):
        own_norm, own_convolution, inputs = copy.deepcopy(norm), copy.deepcopy(convolution), x.clone().requires_grad_()
        carried = weights.clone().requires_grad_() if carries else None
        outputs = function(inputs, own_norm, 0.1, own_convolution, carried)
        (outputs * weights).sum().backward()
        modules = (own_norm, own_convolution)
        gradients = [parameter.grad for module in modules for parameter in module.parameters()]
        gradients += [carried.grad] if carried is not None else []
        results.append([outputs, inputs.grad, *gradients, *own_norm.buffers()])
    for lean, reference in zip(*results, strict=True):
        assert lean is not None
        assert reference is not None
        assert (lean - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize("part_bytes", [2**20, 1], ids=["whole", "parts"])
@pytest.mark.parametrize(("every", "stride", "kernel"), [(1, 1, 3), (1, 2, 3), (2, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_convolution_is_torchs_also_where_its_input_is_taken_from_another_again(
    part_bytes: int, every: int, stride: int, kernel: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean_convolution, "PART_BYTES", part_bytes)
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, kernel, stride, padding=kernel // 2, bias=bias, dtype=torch.float64)
    source = torch.randn(21, 4, 9, 9, dtype=torch.float64)
    results = []
    for lean in (True, False):
        own = copy.deepcopy(layer)
        x = source[:, :, ::every, ::every].clone().requires_grad_()
        outputs = convolved_as_is(x, own, source, every) if lean else own(x)
        (outputs**2).sum().backward()
        results.append([outputs, x.grad, *(parameter.grad for parameter in own.parameters())])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_norm_and_activation_are_torchs_to_the_bit() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=0.1)
    nn.init.uniform_(norm.weight, 0.5, 2)
    x, weights = torch.randn(21, 4, 9, 9) * 3 + 7, torch.randn(21, 4, 9, 9)
    results = []
    for function in (activated, lambda x, norm, slope: F.leaky_relu(norm(x), slope)):
        own, inputs = copy.deepcopy(norm), x.clone().requires_grad_()
        outputs = function(inputs, own, 0.1)
        (outputs * weights).sum().backward()
        results.append([outputs, inputs.grad, own.weight.grad, own.bias.grad, *own.buffers()])
    assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


def test_a_batch_is_cut_where_threads_share_evenly_and_nothing_is_left_out() -> None:
    x = torch.empty(300, 32, 32, 32)
    assert [len(x[rows]) for rows in lean_convolution._parts(x)] == [32, 32, 32, 32, 32, 32, 32, 32, 32, 12]
    assert lean_convolution._parts(x[:2, :1]) == [slice(0, 1024)]


def test_passes_that_leave_running_statistics_alone_do_so_here_too() -> None:
    network = build_network(WideResNetConfig(filters=4, repeat=1), channels=3, image_size=8, classes=3)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    forward_without_bn_update(network, torch.randn(4, 3, 8, 8)).logits.sum().backward()
    assert all(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())
    network.train()(torch.randn(4, 3, 8, 8))
    assert not any(torch.equal(before[name], buffer) for name, buffer in network.named_buffers())


def kept_values(norm: nn.BatchNorm2d, convolution: nn.Conv2d, x: Tensor) -> int:
    """Values of all tensors that the backward pass would read, each memory counted once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = convolved(x, norm, 0.1, convolution)
    assert outputs.requires_grad
    return sum(kept.values())


def test_one_feature_map_is_kept_instead_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, convolution = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
    x = torch.randn(16, 8, 16, 16, requires_grad=True)
    lean = kept_values(norm, convolution, x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    whole = kept_values(norm, convolution, x)
    assert x.numel() <= lean < 1.1 * x.numel()
    assert 2 * x.numel() <= whole < 2.1 * x.numel()
