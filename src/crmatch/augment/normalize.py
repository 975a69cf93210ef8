"""Normalization: uint8 pixels to the floats a network sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Normalizer:
    """(pixel / 255 - mean) / std per channel; with mean = std = 0.5 this is pixel / 127.5 - 1, in [-1, 1]."""

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Keep scale and shift on the device; `mean` and `std` are for pixels scaled to 0..1, one per channel."""
        scale = [1 / (255 * deviation) for deviation in std]
        shift = [average / deviation for average, deviation in zip(mean, std, strict=True)]
        self._scale = torch.tensor(scale, dtype=dtype, device=device)[:, None, None]
        self._shift = torch.tensor(shift, dtype=dtype, device=device)[:, None, None]

    def __call__(self, images: Tensor) -> Tensor:
        """Floats (N, C, H, W) in channels_last memory, which convolutions prefer, from uint8 (N, C, H, W)."""
        pixels = images.to(dtype=self._scale.dtype, memory_format=torch.channels_last)
        return pixels.mul_(self._scale).sub_(self._shift)
