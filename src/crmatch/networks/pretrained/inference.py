"""Pooled features of many images: by onnxruntime if it is installed (about 2.5 times as fast on a CPU), otherwise by torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crmatch.networks.network import to_channels_last
from crmatch.networks.pretrained.catalog import onnxruntime_is_installed


class PooledFeatures(NamedTuple):
    """Computes pooled features."""

    compute: Callable[[Tensor], Tensor]
    """Normalized images (N, 3 or 1, H, W) -> pooled features (N, P)."""
    calls: int
    """How many calls, each from a thread of its own, use all cores."""


def feature_function(body: nn.Module, image_size: int, device: torch.device, by_onnx: bool = True) -> PooledFeatures:
    """The fastest way to compute pooled features of `body` on `device`; `by_onnx` allows onnxruntime."""
    body = body.to(device).eval()
    if by_onnx and device.type == "cpu" and onnxruntime_is_installed():
        return _by_onnxruntime(body, image_size)
    return _by_torch(body)


def _by_torch(body: nn.Module) -> PooledFeatures:
    for parameter in body.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    @torch.inference_mode()
    def compute(images: Tensor) -> Tensor:
        pooled: Tensor = body(to_channels_last(images.expand(-1, 3, -1, -1)))[1]
        return pooled

    return PooledFeatures(compute, calls=1)


class _Pooled(nn.Module):
    """Only the pooled features of a body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.body(images)[1]
        return pooled


def _by_onnxruntime(body: nn.Module, image_size: int) -> PooledFeatures:
    import onnxruntime

    example = torch.zeros(2, 3, image_size, image_size)
    batch = torch.export.Dim("batch")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports that torchvision is absent
    with warnings.catch_warnings(action="ignore"):  # the exporter's own deprecations
        program = torch.onnx.export(_Pooled(body), (example,), dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # several calls at once use the cores better than one call on all of them
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def compute(images: Tensor) -> Tensor:
        color = images.expand(-1, 3, -1, -1).contiguous().numpy()
        return torch.from_numpy(session.run(None, {name: color})[0])

    return PooledFeatures(compute, calls=torch.get_num_threads())
