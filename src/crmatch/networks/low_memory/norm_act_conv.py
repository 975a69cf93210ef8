"""A convolution after norm and activation that keeps one tensor for the backward pass, and works on parts of the batch.

Keeping the activated input of every convolution doubles the memory of a pre-activation network. It is a function of the norm's
input, which is kept anyway, so the backward pass makes it again. Both passes go through the batch in parts that stay in the
processor's cache: no activation of the whole batch is ever written, and the work between two convolutions costs half. The few
convolutions and norms of a network that stand alone are here as well, so that all their large tensors lie in the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from crmatch.networks.arena import empty_rows
from crmatch.networks.config import PART_BYTES
from crmatch.networks.fork import subsampled

ROWS_TOGETHER = 8
"""Parts have a multiple of so many images, which threads can share evenly."""


def convolved(x: Tensor, norm: nn.BatchNorm2d, slope: float, convolution: nn.Conv2d, carried: Tensor | None = None) -> Tensor:
    """convolution(leaky_relu(norm(x))), plus what is `carried` past it; in training on a CPU without keeping activations.

    Joint batch norms, compiled networks and autocast keep them.
    """
    if not (_own_statistics(norm) and _is_lean(x)):
        convolved: Tensor = convolution(F.leaky_relu(norm(x), slope, inplace=True))
        return convolved if carried is None else carried + convolved
    _count_batch(norm)
    outputs: Tensor = _LeanConvolution.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, convolution.weight, convolution.bias, carried, norm, slope, convolution
    )
    return outputs


def convolved_as_is(x: Tensor, convolution: nn.Conv2d, source: Tensor | None = None, stride: int = 1) -> Tensor:
    """convolution(x), in training on a CPU in parts of the batch as well.

    Where x is every `stride`-th pixel of a `source` that is kept for something else, x is not kept but taken from it again.
    """
    if not _is_lean(x):
        return cast(Tensor, convolution(x))
    kept = None if source is None else source.detach()
    outputs: Tensor = _PlainConvolution.apply(  # type: ignore[no-untyped-call]
        x, convolution.weight, convolution.bias, convolution, kept, stride
    )
    return outputs


def activated(x: Tensor, norm: nn.BatchNorm2d, slope: float) -> Tensor:
    """leaky_relu(norm(x)); in training on a CPU the gradient goes back through the activation in place.

    So only where that gradient is nobody else's, as a fork's is.
    """
    if not (_own_statistics(norm) and _is_lean(x)):
        return F.leaky_relu(norm(x), slope, inplace=True)
    _count_batch(norm)
    outputs: Tensor = _Activated.apply(x, norm.weight, norm.bias, norm, slope)  # type: ignore[no-untyped-call]
    return outputs


def _is_lean(x: Tensor) -> bool:
    kept = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    return x.requires_grad and torch.is_grad_enabled() and x.device.type == "cpu" and not kept


def _own_statistics(norm: nn.BatchNorm2d) -> bool:
    return norm.training and type(norm) is nn.BatchNorm2d


def _count_batch(norm: nn.BatchNorm2d) -> None:
    if norm.track_running_stats:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)


def _running(norm: nn.BatchNorm2d) -> tuple[Tensor | None, Tensor | None]:
    return (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)


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
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, *_running(norm), norm.momentum or 0.0)
        factor = scale * torch.rsqrt(variance + norm.eps)
        offset = shift - mean * factor
        ctx.save_for_backward(x, kernel, mean, variance, factor, offset)
        ctx.eps, ctx.slope, ctx.bias_size = norm.eps, slope, None if bias is None else list(bias.shape)
        ctx.stride, ctx.padding, ctx.carries = convolution.stride, convolution.padding, carried is not None

        def outputs(rows: slice) -> Tensor:
            made = F.conv2d(_activated_part(x[rows], factor, offset, slope), kernel, bias, ctx.stride, ctx.padding)
            return made if carried is None else made.add_(carried[rows])

        return _joined(outputs, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel, mean, variance, factor, offset = ctx.saved_tensors
        for_x = empty_rows(len(x), x[0])
        sums: list[Tensor] = []
        for rows in _parts(x):
            activated = _activated_part(x[rows], factor, offset, ctx.slope)
            wanted = [True, True, ctx.bias_size is not None]
            inner, *for_convolution = _convolution_gradients(ctx, gradient[rows], activated, kernel, wanted)
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


class _PlainConvolution(torch.autograd.Function):
    """y = W * x + c. The gradient of x is made in parts, those of W and c are sums over the whole batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None, convolution: nn.Conv2d, source: Tensor | None, every: int
    ) -> Tensor:
        ctx.save_for_backward(x if source is None else source, kernel)
        ctx.every = 1 if source is None else every
        ctx.bias_size = None if bias is None else list(bias.shape)
        ctx.stride, ctx.padding = convolution.stride, convolution.padding
        return _joined(lambda rows: F.conv2d(x[rows], kernel, bias, ctx.stride, ctx.padding), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        x = subsampled(x, ctx.every)

        def for_part(rows: slice) -> Tensor:
            return _convolution_gradients(ctx, gradient[rows], x[rows], kernel, [True, False, False])[0]

        wanted = [False, True, ctx.bias_size is not None]
        for_x, (_, for_kernel, for_bias) = _joined(for_part, x), _convolution_gradients(ctx, gradient, x, kernel, wanted)
        return for_x, for_kernel, for_bias, None, None, None


class _Activated(torch.autograd.Function):
    """torch's own norm and activation, forward and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor, norm: nn.BatchNorm2d, slope: float) -> Tensor:
        running = _running(norm)
        normed, *statistics = torch.native_batch_norm(x, scale, shift, *running, True, norm.momentum or 0.0, norm.eps)
        outputs = F.leaky_relu(normed, slope, inplace=True)
        ctx.save_for_backward(x, scale, outputs, *statistics)
        ctx.running, ctx.eps, ctx.slope = running, norm.eps, slope
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, outputs, mean, inverse_deviation = ctx.saved_tensors
        torch.ops.aten.leaky_relu_backward.grad_input(gradient, outputs, ctx.slope, True, grad_input=gradient)
        for_x, for_scale, for_shift = torch.ops.aten.native_batch_norm_backward(
            gradient, x, scale, *ctx.running, mean, inverse_deviation, True, ctx.eps, [True, True, True]
        )
        return for_x, for_scale, for_shift, None, None


def _convolution_gradients(ctx: Any, gradient: Tensor, x: Tensor, kernel: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
    """Gradients of input, kernel and bias, as far as they are `wanted`; convolutions are neither dilated nor grouped."""
    made: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        gradient, x, kernel, ctx.bias_size, ctx.stride, ctx.padding, [1, 1], False, [0, 0], 1, wanted
    )
    return made


def _joined(make: Callable[[slice], Tensor], x: Tensor) -> Tensor:
    """What `make` makes of the parts of `x`, one after the other."""
    outputs = x.new_empty(0)
    for rows in _parts(x):
        made = make(rows)
        if len(made) == len(x):
            return made
        if not len(outputs):
            outputs = empty_rows(len(x), made[0])
        outputs[rows] = made
    return outputs


def _parts(x: Tensor) -> list[slice]:
    rows = PART_BYTES // (x[0].numel() * x.element_size()) // ROWS_TOGETHER * ROWS_TOGETHER
    return [slice(start, start + max(rows, ROWS_TOGETHER)) for start in range(0, len(x), max(rows, ROWS_TOGETHER))]


def _activated_part(x: Tensor, factor: Tensor, offset: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(_scaled(x, factor, offset), slope, inplace=True)


def _scaled(x: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """(N, C, h, w) times `factor` plus `offset`, both per channel."""
    return torch.addcmul(_per_channel(offset), x, _per_channel(factor))


def _per_channel(values: Tensor) -> Tensor:
    return values[:, None, None]
