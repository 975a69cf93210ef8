"""Synchronized batch norm: mean and variance of the whole batch when it is spread over several processes.

torch's SyncBatchNorm refuses CPU tensors. This one exchanges two small tensors per pass and uses torch's batch-norm kernels.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.distributed.process_group import ProcessGroup
from crmatch.networks.dropout import Dropout
from crmatch.networks.network import Network


def make_distributed(network: Network, processes: ProcessGroup) -> None:
    """Make the backbone of `network` data-parallel over `processes`."""
    network.processes = processes
    for module in list(network.backbone.modules()):
        if isinstance(module, Dropout):
            module.processes = processes
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, SyncBatchNorm2d(child, processes))


class SyncBatchNorm2d(nn.BatchNorm2d):
    """`norm` with its parameters and buffers; in training mode mean and variance are those of all ranks' rows."""

    def __init__(self, norm: nn.BatchNorm2d, processes: ProcessGroup) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, device="meta")
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.processes = processes
        self.training = norm.training  # False for the frozen norms of a pretrained backbone

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize the local rows (n, C, h, w)."""
        if not self.training:
            return super().forward(inputs)
        count, mean, variance = joint_statistics(inputs.detach(), self.processes)
        if self.track_running_stats:
            self._update_running(count, mean, variance)
        dtype = self.weight.dtype
        outputs: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            inputs, self.weight, self.bias, mean.to(dtype), variance.to(dtype), count, self.eps, self.processes
        )
        return outputs

    @torch.no_grad()
    def _update_running(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics with the mean and the unbiased variance, as torch's batch norm does."""
        unbiased = variance * (count / (count - 1).clamp(min=1))
        momentum = cast(float, self.momentum)
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            assert running is not None
            running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)


def joint_statistics(inputs: Tensor, processes: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Count (1,), mean (C,) and biased variance (C,) of all ranks' (n, C, h, w) inputs, in float64.

    From each rank's count n_r, mean m_r and variance v_r: n = sum n_r, m = sum n_r m_r / n, and
    v = sum n_r (v_r + (m_r - m)^2) / n, which is stable even if means are large.
    """
    channels = inputs.shape[1]
    pixels = inputs.numel() // channels
    own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=inputs.device)
    if pixels:
        own[0] = pixels
        own[1:] = torch.cat(torch.ops.aten.batch_norm_update_stats(inputs, None, None, 0.0))
    every = processes.all_gather_rows(own[None], processes.count)
    counts, means, variances = torch.split(every, [1, channels, channels], dim=1)
    count = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / count
    return count, mean, (counts * (variances + (means - mean).square())).sum(dim=0) / count


class _Normalize(torch.autograd.Function):
    """y = w (x - m) / s + b, s^2 = v + eps, with m and v of the n pixels of all ranks.

    dx = (w / s) (dy - sum dy / n - xhat sum(dy xhat) / n), both sums over all ranks; dw and db are the local parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        processes: ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, mean, variance, count)
        ctx.eps, ctx.processes = eps, processes
        return F.batch_norm(inputs, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, variance, count = ctx.saved_tensors
        weight_gradient, bias_gradient = torch.zeros_like(weight), torch.zeros_like(weight)
        if len(inputs):  # without rows torch's kernel divides by zero
            # In evaluation mode torch's kernel returns just the two sums: of dy xhat, and of dy.
            _, weight_gradient, bias_gradient = torch.ops.aten.native_batch_norm_backward(
                gradient, inputs, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        sums = ctx.processes.all_reduce_sum(torch.stack([weight_gradient, bias_gradient]))
        correlation, total = sums / count.to(weight.dtype)
        scale = weight * torch.rsqrt(variance + ctx.eps)
        shift = F.batch_norm(inputs, mean, variance, -scale * correlation, -scale * total, training=False, eps=ctx.eps)
        input_gradient = torch.addcmul(shift, gradient, scale.view(1, -1, 1, 1))
        return input_gradient, weight_gradient, bias_gradient, None, None, None, None, None
