"""A convolution after norm and activation that keeps one tensor for the backward pass instead of two.

Keeping the activated input of every convolution doubles the memory of a pre-activation network. It is a function of the norm's
input, which is kept anyway, and the backward pass makes it again by the same kernels: same bits, for a few percent of time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def convolved(x: Tensor, norm: nn.BatchNorm2d, slope: float, convolution: nn.Conv2d) -> Tensor:
    """convolution(leaky_relu(norm(x))); in training on a CPU without keeping the activated input.

    Joint batch norms, compiled networks and autocast keep it.
    """
    lean = norm.training and torch.is_grad_enabled() and x.device.type == "cpu" and type(norm) is nn.BatchNorm2d
    if not lean or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        activated: Tensor = convolution(F.leaky_relu(norm(x), slope, inplace=True))
        return activated
    if norm.track_running_stats:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
    outputs: Tensor = _LeanConvolution.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, convolution.weight, convolution.bias, norm, slope, convolution
    )
    return outputs


class _LeanConvolution(torch.autograd.Function):
    """y = W * a + c with a = leaky_relu(gamma (x - m) / s + beta), m and s those of the batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        norm: nn.BatchNorm2d,
        slope: float,
        convolution: nn.Conv2d,
    ) -> Tensor:
        running = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
        activated, mean, inverse = _activated(x, scale, shift, running, norm.momentum or 0.0, norm.eps, slope)
        ctx.save_for_backward(x, scale, shift, kernel, mean, inverse)
        ctx.eps, ctx.slope, ctx.bias_size = norm.eps, slope, None if bias is None else list(bias.shape)
        ctx.stride, ctx.padding = convolution.stride, convolution.padding
        return F.conv2d(activated, kernel, bias, ctx.stride, ctx.padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, kernel, mean, inverse = ctx.saved_tensors
        activated, _, _ = _activated(x, scale, shift, (None, None), 0.0, ctx.eps, ctx.slope)
        wanted = [True, True, ctx.bias_size is not None]
        inner, for_kernel, for_bias = torch.ops.aten.convolution_backward(
            gradient, activated, kernel, ctx.bias_size, ctx.stride, ctx.padding, [1, 1], False, [0, 0], 1, wanted
        )
        torch.ops.aten.leaky_relu_backward.grad_input(inner, activated, ctx.slope, True, grad_input=inner)
        del activated
        for_x, for_scale, for_shift = torch.ops.aten.native_batch_norm_backward(
            inner, x, scale, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        return for_x, for_scale, for_shift, for_kernel, for_bias, None, None, None


def _activated(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    running: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
    slope: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """leaky_relu(norm(x)), with the batch's mean and inverse deviation; `running` statistics are moved."""
    normalized, mean, inverse = torch.native_batch_norm(x, scale, shift, *running, True, momentum, eps)
    return F.leaky_relu(normalized, slope, inplace=True), mean, inverse
