"""A convolution after norm and activation that keeps one tensor for the backward pass, and works on parts of the batch.

Keeping the activated input of every convolution doubles the memory of a pre-activation network. It is a function of the norm's
input, which is kept anyway, so the backward pass makes it again. Both passes go through the batch in parts that stay in the
processor's cache: no activation of the whole batch is ever written, and the work between two convolutions costs half.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from crmatch.networks.config import PART_BYTES

ROWS_TOGETHER = 8
"""Parts have a multiple of so many images, which threads can share evenly."""


def convolved(x: Tensor, norm: nn.BatchNorm2d, slope: float, convolution: nn.Conv2d, carried: Tensor | None = None) -> Tensor:
    """convolution(leaky_relu(norm(x))), plus what is `carried` past it; in training on a CPU without keeping activations.

    Joint batch norms, compiled networks and autocast keep them.
    """
    lean = norm.training and torch.is_grad_enabled() and x.device.type == "cpu" and type(norm) is nn.BatchNorm2d
    if not lean or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        activated: Tensor = convolution(F.leaky_relu(norm(x), slope, inplace=True))
        return activated if carried is None else carried + activated
    if norm.track_running_stats:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
    outputs: Tensor = _LeanConvolution.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, convolution.weight, convolution.bias, carried, norm, slope, convolution
    )
    return outputs


class _LeanConvolution(torch.autograd.Function):
    """y = W * a + c + r: a = leaky_relu(f x + o), f = gamma / s, o = beta - f m, m and s of the batch's n pixels, r carried.

    With g = dL/d(f x + o) and xhat = (x - m) / s: dgamma = sum g xhat, dbeta = sum g, dx = f (g - dbeta / n - xhat dgamma / n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        carried: Tensor | None,
        norm: nn.BatchNorm2d,
        slope: float,
        convolution: nn.Conv2d,
    ) -> Tensor:
        running = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, *running, norm.momentum or 0.0)
        factor = scale * torch.rsqrt(variance + norm.eps)
        offset = shift - mean * factor
        ctx.save_for_backward(x, kernel, mean, variance, factor, offset)
        ctx.eps, ctx.slope, ctx.bias_size = norm.eps, slope, None if bias is None else list(bias.shape)
        ctx.stride, ctx.padding, ctx.carries = convolution.stride, convolution.padding, carried is not None
        outputs = x.new_empty(0)
        for rows in _parts(x):
            made = F.conv2d(_activated(x[rows], factor, offset, slope), kernel, bias, ctx.stride, ctx.padding)
            if carried is not None:
                made += carried[rows]
            if len(made) == len(x):
                return made
            if not len(outputs):
                outputs = torch.empty((len(x), *made.shape[1:]), dtype=x.dtype, memory_format=torch.channels_last)
            outputs[rows] = made
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, mean, variance, factor, offset = ctx.saved_tensors
        for_x = torch.empty_like(x)
        sums: list[Tensor] = []
        for rows in _parts(x):
            activated = _activated(x[rows], factor, offset, ctx.slope)
            wanted = [True, True, ctx.bias_size is not None]
            inner, *for_convolution = torch.ops.aten.convolution_backward(
                gradient[rows], activated, kernel, ctx.bias_size, ctx.stride, ctx.padding, [1, 1], False, [0, 0], 1, wanted
            )
            torch.ops.aten.leaky_relu_backward.grad_input(inner, activated, ctx.slope, True, grad_input=for_x[rows])
            # torch's backward of evaluation mode gives just the two sums.
            _, *for_norm = torch.ops.aten.native_batch_norm_backward(
                for_x[rows], x[rows], None, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
            terms = [term for term in (*for_norm, *for_convolution) if term is not None]
            if sums:
                torch._foreach_add_(sums, terms)
            else:
                sums = terms
        for_scale, for_shift, for_kernel, *for_bias = sums
        count = x.numel() // len(mean)
        by_x = -factor * torch.rsqrt(variance + ctx.eps) * for_scale / count
        constant = -factor * for_shift / count - by_x * mean
        for rows in _parts(x):
            torch.addcmul(_scaled(x[rows], by_x, constant), for_x[rows], _per_channel(factor), out=for_x[rows])
        for_carried = gradient if ctx.carries else None
        return for_x, for_scale, for_shift, for_kernel, for_bias[0] if for_bias else None, for_carried, None, None, None


def _parts(x: Tensor) -> list[slice]:
    rows = PART_BYTES // (x[0].numel() * x.element_size()) // ROWS_TOGETHER * ROWS_TOGETHER
    return [slice(start, start + max(rows, ROWS_TOGETHER)) for start in range(0, len(x), max(rows, ROWS_TOGETHER))]


def _activated(x: Tensor, factor: Tensor, offset: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(_scaled(x, factor, offset), slope, inplace=True)


def _scaled(x: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """(N, C, h, w) times `factor` plus `offset`, both per channel."""
    return torch.addcmul(_per_channel(offset), x, _per_channel(factor))


def _per_channel(values: Tensor) -> Tensor:
    return values[:, None, None]
