"""What a method remembers of images or classes: buffers, so that checkpoints carry them and nothing trains them."""

from __future__ import annotations

from torch import Tensor, nn

from crmatch.networks.outputs import Network


class Memory(nn.Module):
    """A head without weights: named tensors that are written in place."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(name)


def memory_of(network: Network) -> Memory:
    """The head `memory` of a network that has one."""
    memory = network.heads["memory"]
    assert isinstance(memory, Memory)
    return memory
