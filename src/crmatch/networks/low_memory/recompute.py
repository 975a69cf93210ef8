"""Gradient checkpointing (`--recompute`): store the inputs of groups of blocks, recompute the rest in the backward pass.

Recomputing changes no result: batch norms see the same batch and update their running statistics only once, and dropout draws
the same masks again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crmatch.networks.dropout import Dropout, dropout_from

_BatchNorm = nn.modules.batchnorm._BatchNorm
GROUP = 2
"""Blocks per group. With four blocks per stage, groups of two need the least memory: on STL-10 2.5 GiB less than groups of one,
3.8 GiB less than groups of four."""


class Recomputable(nn.Module):
    """A chain of blocks that supports gradient checkpointing (`--recompute`)."""

    recompute = False
    """Whether activations are recomputed in the backward pass."""

    def run_blocks(self, blocks: Sequence[nn.Module], first: int, x: Tensor) -> Tensor:
        """Apply `blocks` in sequence, checkpointing groups of GROUP blocks, and each block again inside its group.

        The first group has `first` blocks, because it may include the stem.
        """
        for start, end in itertools.pairwise([0, *range(first, len(blocks), GROUP), len(blocks)]):
            x = self._checkpointed(partial(self._run_each, blocks[start:end]), x)
        return x

    def _run_each(self, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = self._checkpointed(block, x)
        return x

    def _checkpointed(self, function: nn.Module | partial[Tensor], x: Tensor) -> Tensor:
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            y: Tensor = function(x)
            return y
        contexts = partial(_contexts, self)
        y = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return y


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first computation and of the second one."""
    norms = [(norm, norm.track_running_stats) for norm in module.modules() if isinstance(norm, _BatchNorm)]
    generators = [dropout.generator for dropout in module.modules() if isinstance(dropout, Dropout)]
    generator = next((one for one in generators if one is not None), None)
    return nullcontext(), _second_time(module, norms, None if generator is None else generator.get_state())


@contextmanager
def _second_time(module: nn.Module, norms: list[tuple[_BatchNorm, bool]], state: Tensor | None) -> Iterator[None]:
    """Norms update copies of their running statistics (torch wants the same operations); dropouts draw the same masks."""
    generator = None if state is None else torch.Generator().set_state(state)
    before = [(norm.track_running_stats, dict(norm.named_buffers(recurse=False))) for norm, _ in norms]
    for norm, tracked in norms:
        norm.track_running_stats = tracked
        _set_buffers(norm, {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)})
    try:
        with dropout_from(module, generator):
            yield
    finally:
        for (norm, _), (tracking, buffers) in zip(norms, before, strict=True):
            norm.track_running_stats = tracking
            _set_buffers(norm, buffers)


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)
