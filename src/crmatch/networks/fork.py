"""Values that go two ways, and their gradients, which are added in place where they are nobody else's.

Autograd would make a new tensor for the sum, and for a shortcut or pooled gradient one more of the size of the map.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable


def forked(x: Tensor, stride: int = 1) -> tuple[Tensor, Tensor]:
    """`x` (N, C, H, W), to be convolved and nothing else, and every `stride`-th pixel of it for the shortcut.

    A strided 1x1 convolution is a plain one on these pixels. Written so because oneDNN's strided 1x1 kernel writes past its
    buffers in the backward pass where a channels_last input has 2 to 7 channels (torch 2.13, AVX2).
    """
    if torch.compiler.is_compiling() or not x.requires_grad:
        return x, subsampled(x, stride)
    both: tuple[Tensor, Tensor] = _Fork.apply(x, stride)  # type: ignore[no-untyped-call]
    return both


class _Fork(torch.autograd.Function):
    """The first way leads into a convolution, whose gradient is a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int) -> tuple[Tensor, Tensor]:
        ctx.stride = stride
        return x, subsampled(x, stride)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_convolutions: Tensor, for_shortcut: Tensor) -> tuple[Tensor, None]:
        for_convolutions[:, :, :: ctx.stride, :: ctx.stride] += for_shortcut
        return for_convolutions, None


def subsampled(x: Tensor, stride: int) -> Tensor:
    """As means of one pixel, because their gradient keeps the layout; a slice's does not."""
    return x if stride == 1 else F.avg_pool2d(x, kernel_size=1, stride=stride)


def with_pooled(feature_map: Tensor) -> tuple[Tensor, Tensor]:
    """`feature_map` (N, D, h, w) and its means over pixels (N, D)."""
    if not feature_map.requires_grad:
        return feature_map, _pooled(feature_map)
    both: tuple[Tensor, Tensor] = _WithPooled.apply(feature_map)  # type: ignore[no-untyped-call]
    return both


class _WithPooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feature_map: Tensor) -> tuple[Tensor, Tensor]:
        ctx.pixels, ctx.shape = feature_map[0, 0].numel(), feature_map.shape
        ctx.set_materialize_grads(False)
        return feature_map, _pooled(feature_map)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_map: Tensor | None, for_pooled: Tensor | None) -> Tensor | None:
        of_each = None if for_pooled is None else (for_pooled / ctx.pixels)[:, :, None, None]
        if for_map is None:
            return None if of_each is None else of_each.expand(ctx.shape).contiguous(memory_format=torch.channels_last)
        # Heads that flatten the map give gradients in the other layout.
        own = for_map.contiguous(memory_format=torch.channels_last)
        if of_each is None:
            return own
        return own + of_each if own is for_map else own.add_(of_each)


def _pooled(feature_map: Tensor) -> Tensor:
    return F.avg_pool2d(feature_map, feature_map.shape[2:]).flatten(start_dim=1)
