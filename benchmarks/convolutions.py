"""Record the convolution kernels that a function calls, and call them again with nothing in between.

They are the same in every program that trains the same network with the same library. Their time is therefore a lower bound
for a step, and a program can save at most the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of convolutions by their arguments: the shapes of tensors, other arguments themselves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (FORWARD, BACKWARD):
            self.calls[(function, *map(_description, args))] += 1
        return function(*args, **(kwargs or {}))


def kernels_of(work: Callable[[], object]) -> Callable[[], None]:
    """A function that calls the convolution kernels of `work`, equally often, on random tensors of the same shapes."""
    with _Recorder() as recorder:
        work()
    tensors: dict[torch.Size, Tensor] = {}
    calls = [
        (function, [_tensor(argument, tensors) for argument in arguments], count)
        for (function, *arguments), count in recorder.calls.items()
    ]

    def kernels() -> None:
        with torch.no_grad():
            for function, arguments, count in calls:
                for _ in range(count):
                    function(*arguments)

    return kernels


def _description(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.shape
    return tuple(argument) if isinstance(argument, list) else argument


def _tensor(argument: Any, made: dict[torch.Size, Tensor]) -> Any:
    """A tensor of the described shape, one for each shape; any other argument unchanged."""
    if not isinstance(argument, torch.Size):
        return argument
    if argument not in made:
        tensor = torch.randn(argument, generator=torch.Generator().manual_seed(0))
        made[argument] = tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
    return made[argument]
