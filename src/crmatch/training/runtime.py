"""Whether this CPU computes in half precision, found out by a process that may die of it.

Some virtual machines advertise matrix instructions (AMX) that they do not have: the first convolution in bfloat16 then ends the
process with an illegal instruction, which no program can catch.

Compiled training passes of a network's backbone, and what happens where nothing can be compiled.

Everything about the machine: device, precision, threads, versions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from crmatch.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from crmatch.errors import RequestError
from crmatch.networks.network import Network
from crmatch.training.execution import Execution

TRIAL = """
import torch
from torch import nn
images = torch.ones(8, 16, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
network = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(), nn.Conv2d(32, 32, 3, 2, padding=1))
with torch.autocast("cpu", dtype=torch.bfloat16):
    outputs = network(images)
torch.autograd.grad(outputs.float().square().mean(), [images, *network.parameters()])
"""
COMMAND = (sys.executable, "-c", TRIAL)
TIMEOUT = 120.0
"""Seconds; most of them go to importing torch on a busy machine."""


def half_precision_problem(precision: str) -> str | None:
    """Why a CPU cannot train in `precision`, in words; None where it can."""
    if precision == "fp16":
        return "a CPU has no fast fp16"
    return trial_problem(COMMAND, TIMEOUT) if precision == "bf16" else None


@functools.cache
def trial_problem(command: tuple[str, ...], timeout: float) -> str | None:
    """How a trial of bfloat16 in a process of its own failed; None where it did not. Asked once per process."""
    found = "a trial of bf16 on this CPU"
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"{found} did not end within {timeout:g} s"
    except OSError as error:
        return f"{found} could not be started: {error.strerror}"
    if code < 0:
        return f"{found} was ended by {signal.Signals(-code).name}"
    return f"{found} failed with code {code}" if code else None


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


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
"""Precision -> type of weights, losses and everything that is not said to be otherwise."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision -> type of the backbone's values in training."""


@dataclass(frozen=True)
class Runtime:
    """Where and in which numbers a run computes.

    Attributes:
        device: of all tensors.
        dtype: of weights, images and losses.
        processes: who shares the run.
        autocast: type of the backbone's values in training; None: `dtype`.
        compile: whether the backbone's training passes are compiled.
        recompute: whether values are computed again in the backward pass instead of being kept.
    """

    device: torch.device
    dtype: torch.dtype
    processes: ProcessGroup = SINGLE_PROCESS
    autocast: torch.dtype | None = None
    compile: bool = False
    recompute: bool = False

    @property
    def host_sync_is_free(self) -> bool:
        """Whether reading a value back costs nothing, so that every loss can be checked at once."""
        return self.device.type == "cpu"

    @property
    def lean(self) -> bool:
        """Whether convolutions keep no activations (networks/lean_convolution.py)."""
        return self.device.type == "cpu" and self.processes.count == 1 and self.autocast is None and not self.compile


@cache
def keep_freed_memory() -> None:
    """Tell glibc, once per process, to keep freed memory for the next step instead of giving it back and asking anew.

    Activations are large and live for one step; returning them costs a third of a small network's step time.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_MAX, 0):
        logger.info("memory: glibc keeps what a step frees for the next one")


def choose_runtime(
    execution: Execution = Execution(), precision: str = "fp32", processes: ProcessGroup = SINGLE_PROCESS
) -> Runtime:
    """The runtime asked for; `auto` takes a GPU where there is one, and each of several processes its own."""
    device, compile, recompute = execution
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and processes.count > 1:
        device = f"cuda:{torch.cuda.current_device()}"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise RequestError(f"unknown device {device!r}.\nUse auto, cpu, cuda or cuda:0.") from error
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise RequestError(f"device {device!r} was asked for, but this machine has no such device.\nUse --device cpu.")
    if compile and recompute:
        raise RequestError("--compile and --recompute were asked for, and compiled code recomputes nothing.\nUse one of them.")
    if chosen.type == "cpu" and (problem := half_precision_problem(precision)):
        raise RequestError(f"--precision {precision} was asked for, and {problem}.\nUse --precision fp32.")
    # Where memory is short, freed memory goes back: kept, its gaps make a process half as large again.
    if chosen.type == "cpu" and not recompute:
        keep_freed_memory()
    return Runtime(chosen, DTYPES[precision], processes, AUTOCAST.get(precision), compile, recompute)


def describe_machine(runtime: Runtime, compiled: bool = False) -> dict[str, Any]:
    """What a record says about where its numbers come from; `compiled`: by compiled code."""
    import numpy
    import PIL

    return {
        "device": str(runtime.device),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": runtime.processes.count,
        "compiled": compiled,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "pillow": PIL.__version__,
        },
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The source's git commit, with `+` where files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environment)
        return answer.stdout.strip()
    return None
