"""Norm, activation and convolution as one operation that stores one feature map for the backward pass instead of two.

A pre-activation network stores the input of every norm and the input of every convolution. The second is a cheap function of
the first, so the lean version computes it again in the backward pass. Both passes work on slices of the batch that fit into
the processor's cache, so the activated map is never written to memory as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from crmatch.networks.config import SLICE_BYTES

ROWS_TOGETHER = 8
"""Slices have a multiple of 8 images, so that threads share them evenly."""


def norm_act_conv(
    x: Tensor, norm: nn.BatchNorm2d, slope: float, conv: nn.Conv2d, skip: Tensor | None = None, *, lean: bool = False
) -> Tensor:
    """conv(leaky_relu(norm(x))) + skip; `lean` selects the memory-saving version for training passes on a CPU."""
    if not (lean and norm.training and x.requires_grad and torch.is_grad_enabled()):
        y: Tensor = conv(F.leaky_relu(norm(x), slope, inplace=True))
        return y if skip is None else skip + y
    if norm.track_running_stats:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
    y = _NormActConv.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, conv.weight, conv.bias, skip, norm, slope, conv
    )
    return y


class _NormActConv(torch.autograd.Function):
    """y = W * a + c + r with a = leaky_relu(f x + o), f = gamma / s, o = beta - f m, skip r, batch mean m and deviation s.

    Backward: with g = dL/d(f x + o), xhat = (x - m) / s and n pixels per channel,
    dgamma = sum g xhat, dbeta = sum g, dx = f (g - dbeta / n - xhat dgamma / n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        kernel: Tensor,
        bias: Tensor | None,
        skip: Tensor | None,
        norm: nn.BatchNorm2d,
        slope: float,
        conv: nn.Conv2d,
    ) -> Tensor:
        running = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, *running, norm.momentum or 0.0)
        factor = gamma * torch.rsqrt(variance + norm.eps)
        offset = beta - mean * factor
        ctx.save_for_backward(x, kernel, mean, variance, factor, offset)
        ctx.eps, ctx.slope, ctx.bias_shape = norm.eps, slope, None if bias is None else list(bias.shape)
        ctx.stride, ctx.padding, ctx.has_skip = conv.stride, conv.padding, skip is not None
        outputs = x.new_empty(0)
        for rows in _slices(x):
            y = F.conv2d(_activated(x[rows], factor, offset, slope), kernel, bias, ctx.stride, ctx.padding)
            if skip is not None:
                y += skip[rows]
            if len(y) == len(x):
                return y
            if not len(outputs):
                outputs = torch.empty((len(x), *y.shape[1:]), dtype=x.dtype, memory_format=torch.channels_last)
            outputs[rows] = y
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, mean, variance, factor, offset = ctx.saved_tensors
        dx = torch.empty_like(x)
        sums: list[Tensor] = []  # dgamma, dbeta, dkernel and dbias, added up over the slices
        for rows in _slices(x):
            activated = _activated(x[rows], factor, offset, ctx.slope)
            wanted = [True, True, ctx.bias_shape is not None]
            d_activated, *d_conv = torch.ops.aten.convolution_backward(
                dy[rows], activated, kernel, ctx.bias_shape, ctx.stride, ctx.padding, [1, 1], False, [0, 0], 1, wanted
            )
            torch.ops.aten.leaky_relu_backward.grad_input(d_activated, activated, ctx.slope, True, grad_input=dx[rows])
            # In evaluation mode torch's kernel returns just the two sums dgamma and dbeta.
            _, *d_norm = torch.ops.aten.native_batch_norm_backward(
                dx[rows], x[rows], None, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
            terms = [term for term in (*d_norm, *d_conv) if term is not None]
            if sums:
                torch._foreach_add_(sums, terms)
            else:
                sums = terms
        dgamma, dbeta, dkernel, *dbias = sums
        pixels = x.numel() // len(mean)
        slope_of_x = -factor * torch.rsqrt(variance + ctx.eps) * dgamma / pixels
        constant = -factor * dbeta / pixels - slope_of_x * mean
        for rows in _slices(x):
            torch.addcmul(_affine(x[rows], slope_of_x, constant), dx[rows], _per_channel(factor), out=dx[rows])
        return dx, dgamma, dbeta, dkernel, dbias[0] if dbias else None, dy if ctx.has_skip else None, None, None, None


def _slices(x: Tensor) -> list[slice]:
    rows = max(SLICE_BYTES // (x[0].numel() * x.element_size()) // ROWS_TOGETHER, 1) * ROWS_TOGETHER
    return [slice(start, start + rows) for start in range(0, len(x), rows)]


def _activated(x: Tensor, factor: Tensor, offset: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(_affine(x, factor, offset), slope, inplace=True)


def _affine(x: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """Factor x + offset, both per channel, for x (N, C, h, w)."""
    return torch.addcmul(_per_channel(offset), x, _per_channel(factor))


def _per_channel(values: Tensor) -> Tensor:
    return values[:, None, None]
