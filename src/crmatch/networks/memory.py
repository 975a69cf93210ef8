"""What a method remembers of images or classes: buffers, so that checkpoints carry them and nothing trains them."""

from __future__ import annotations

from torch import Tensor, nn


class Memory(nn.Module):
    """A head without weights: named tensors that are written in place."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(name)
