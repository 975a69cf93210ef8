"""Compiled training passes of a network's backbone, and what happens where nothing can be compiled."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from crmatch.networks.outputs import Network

logger = logging.getLogger(__name__)


class Compiler:
    """Compiles a backbone's passes by torch's inductor; where that fails, a line in the log says why and passes are eager.

    The module is compiled in place, so names of weights stay, and copies (the moving average) are not compiled. Each shape and
    mode of a training pass is compiled once; `Network` leaves passes in eval mode, which have many shapes, alone.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why nothing is compiled; known after the first pass."""

    def compile(self, network: Network) -> None:
        """Let the training passes of `network` be compiled when they first happen."""
        if network.processes.count > 1:
            self._give_up("it exchanges batch statistics with other processes")
        else:
            backbone = network.backbone
            backbone.compile(backend=_inductor, dynamic=False)
            assert backbone._compiled_call_impl is not None
            backbone._compiled_call_impl = partial(self._call, backbone, backbone._compiled_call_impl)

    def _call(self, backbone: nn.Module, compiled: Callable[..., Any], images: Tensor) -> Any:
        """A compiled pass; where compiling it fails, nothing of it has happened yet, and this and all later ones are eager."""
        try:
            return compiled(images)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            self._give_up(_reason(error.inner_exception))
        backbone._compiled_call_impl = None
        return backbone(images)

    def _give_up(self, reason: str) -> None:
        self.problem = reason
        logger.warning("the network is not compiled: %s; training goes on without", reason)


def _inductor(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    with warnings.catch_warnings(action="ignore"):  # torch's own, about itself
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)


def _reason(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
