"""Small models of transformers and timm: random weights, images, and a torchvision that both can import."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

_OPERATORS: list[torch.library.Library] = []
"""Operators exist as long as their library object."""


def make_torchvision_importable() -> None:
    """Declare torchvision's operators `nms` and `qnms` if it cannot be imported without them.

    PyPI's torchvision is built for CUDA. Beside a CPU build of torch its own operators cannot be loaded.
    """
    if _OPERATORS or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _OPERATORS.append(library)


def randomize(model: nn.Module) -> Any:
    """Weights that all matter: libraries initialize some with zeros, and small networks forget their images."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or "inv_freq" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if noise.ndim > 1:
            tensor.copy_(noise * (2 * len(noise) / noise.numel()) ** 0.5)
        else:  # scales of norms stay positive
            tensor.copy_(1 + noise.abs() if name.endswith(("weight", "running_var")) else noise)
    return model.eval()


def images(height: int, width: int) -> Tensor:
    """Two normalized images, always the same."""
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def assert_same_outputs(one: nn.Module, other: nn.Module, side: int = 64) -> None:
    """Both bodies give the same feature map and pooled features, to the bit."""
    with torch.no_grad():
        for expected, found in zip(one.eval()(images(side, side)), other.eval()(images(side, side)), strict=True):
            assert torch.equal(expected, found)


def assert_exports_with_any_batch(body: nn.Module, side: int) -> None:
    """As `crmatch export` does: the exported graph takes another number of images than it was traced with."""
    dynamic = {"images": {0: torch.export.Dim("batch", min=1)}}
    exported = torch.export.export(body.eval(), (images(side, side),), dynamic_shapes=dynamic).module()
    three = torch.cat([images(side, side), images(side, side)[:1]])
    with torch.no_grad():
        torch.testing.assert_close(exported(three), body(three))
