"""Networks that keep less for the backward pass: the values inside a part are computed a second time when they are needed.

The second time changes nothing: batch norms use the same batch statistics and leave their running ones alone, dropout draws the
same masks, and where processes share the rows all of them come to the same parts in the same order. Parts may lie inside parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crmatch.networks.dropout import Dropout

NORMS = nn.modules.batchnorm._BatchNorm
GROUP = 2
"""Blocks of which only the input of the first one is kept. Where stages have four blocks, the least is alive at once with
groups of two: on STL-10 2.5 and 3.8 GiB less than with groups of one and four."""


class Recomputing(nn.Module):
    """A module that can keep the inputs of its parts only."""

    recompute = False
    """Whether it does."""

    def part(self, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """`function`, made of modules of this one, of `inputs`; where it is recomputed, nothing in it is kept."""
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return function(inputs)
        contexts = partial(_contexts, self)
        outputs: Tensor = checkpoint(function, inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return outputs

    def chain(self, modules: Sequence[nn.Module], first: int, inputs: Tensor) -> Tensor:
        """`modules` one after the other; groups of them (the first one of `first`) are parts, and in a group each module is."""
        for start, end in itertools.pairwise([0, *range(first, len(modules), GROUP), len(modules)]):
            inputs = self.part(partial(self._each, modules[start:end]), inputs)
        return inputs

    def _each(self, modules: Sequence[nn.Module], inputs: Tensor) -> Tensor:
        for module in modules:
            inputs = self.part(module, inputs)
        return inputs


def recompute_parts(network: nn.Module) -> None:
    """Let every module of `network` that can do so keep the inputs of its parts only."""
    for module in network.modules():
        if isinstance(module, Recomputing):
            module.recompute = True


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds the first computation and the second one."""
    norms = [(norm, norm.track_running_stats) for norm in module.modules() if isinstance(norm, NORMS)]
    dropouts = [dropout for dropout in module.modules() if isinstance(dropout, Dropout)]
    drawn_from = next((dropout.generator for dropout in dropouts if dropout.generator is not None), None)
    return nullcontext(), _again(norms, dropouts, None if drawn_from is None else drawn_from.get_state())


@contextmanager
def _again(norms: list[tuple[NORMS, bool]], dropouts: list[Dropout], state: Tensor | None) -> Iterator[None]:
    """The second computation: norms track as they did, but into copies; dropouts draw from where the generator was."""
    generator = None if state is None else torch.Generator().set_state(state)
    norms_before = [(norm.track_running_stats, dict(norm.named_buffers(recurse=False))) for norm, _ in norms]
    generators_before = [dropout.generator for dropout in dropouts]
    for norm, tracked in norms:
        norm.track_running_stats = tracked
        _set_buffers(norm, {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)})
    for dropout in dropouts:
        dropout.generator = generator
    try:
        yield
    finally:
        for (norm, _), (tracking, buffers) in zip(norms, norms_before, strict=True):
            norm.track_running_stats = tracking
            _set_buffers(norm, buffers)
        for dropout, before in zip(dropouts, generators_before, strict=True):
            dropout.generator = before


def _set_buffers(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        setattr(module, name, buffer)
