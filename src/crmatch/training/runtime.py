"""Everything about the machine: device, precision, compiled code, memory allocator, versions."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crmatch.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from crmatch.errors import RequestError
from crmatch.training.execution import Activations, Execution

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
"""Precision -> type of weights, images and losses."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision -> type of the backbone's activations in training."""


@dataclass(frozen=True)
class Runtime:
    """Where and with which numbers a run computes."""

    device: torch.device  # of all tensors
    dtype: torch.dtype  # of weights, images and losses
    processes: ProcessGroup = SINGLE_PROCESS
    autocast: torch.dtype | None = None  # type of the backbone's activations in training; None: `dtype`
    compile: bool = False  # whether the backbone's training passes are compiled
    recompute: bool = False  # whether activations are recomputed in the backward pass

    @property
    def data_device(self) -> torch.device:
        """Where images are kept and augmented. Apple's GPUs have no float64, which the exact augmentation needs."""
        return torch.device("cpu") if self.device.type == "mps" else self.device

    @property
    def host_sync_is_free(self) -> bool:
        """Whether reading a value back costs nothing, so that every loss can be checked at once."""
        return self.device.type == "cpu"

    @property
    def lean(self) -> bool:
        """Whether norm, activation and convolution are fused (networks/low_memory/norm_act_conv.py)."""
        return self.device.type == "cpu" and self.processes.count == 1 and self.autocast is None and not self.compile

    @property
    def activations(self) -> Activations:
        """What a training pass stores for the backward pass."""
        return "recomputed" if self.recompute else "lean" if self.lean else "kept"


def choose_runtime(
    execution: Execution = Execution(), precision: str = "fp32", processes: ProcessGroup = SINGLE_PROCESS
) -> Runtime:
    """The runtime that `execution` asks for, or an error that says what this machine cannot do."""
    device = execution.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and processes.count > 1:
        device = f"cuda:{torch.cuda.current_device()}"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise RequestError(f"unknown device {device!r}.\nUse auto, cpu, cuda, cuda:0 or mps.") from error
    is_here: dict[str, Callable[[], bool]] = {
        "cpu": lambda: True,
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
    }
    if chosen.type not in is_here or not is_here[chosen.type]():
        raise RequestError(f"this machine has no device {device!r}.\nUse --device cpu.")
    if chosen.type == "mps" and (precision != "fp32" or processes.count > 1):
        raise RequestError("--device mps works in fp32 and with one process only.\nUse --device cpu, or --precision fp32.")
    if execution.compile and execution.recompute:
        raise RequestError("--compile and --recompute exclude each other.\nUse one of them.")
    if execution.compile and processes.count > 1:
        raise RequestError("--compile works with one process only.\nLeave it out, or train without torchrun.")
    if chosen.type == "cpu" and (problem := half_precision_problem(precision)):
        raise RequestError(f"--precision {precision} is not possible here: {problem}.\nUse --precision fp32.")
    # A recomputing run is short of memory: if it kept freed memory, fragmentation would make it half as large again.
    if chosen.type == "cpu" and not execution.recompute:
        keep_freed_memory()
    return Runtime(chosen, DTYPES[precision], processes, AUTOCAST.get(precision), execution.compile, execution.recompute)


@cache
def keep_freed_memory() -> None:
    """Tell glibc, once per process, to keep freed memory for the next step.

    Activations are large and live for one step. Returning them to the system costs a third of a small network's step time.
    """
    trim_threshold, mmap_max = -1, -4  # parameters of mallopt
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


COMPILER: str | Callable[..., Any] = "inductor"
"""The backend of torch.compile."""


def compile_backbone(backbone: nn.Module) -> None:
    """Compile the calls of `backbone` with torch.compile when they first happen; `backbone.forward` stays eager."""
    backbone.compile(backend=COMPILER, dynamic=False)
    compiled: Callable[[Tensor], Tensor] | None = backbone._compiled_call_impl
    assert compiled is not None

    def call(images: Tensor) -> Tensor:
        try:
            return compiled(images)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error.inner_exception).strip().partition("\n")[0]
            raise RequestError(f"the network cannot be compiled here: {reason}.\nLeave out --compile.") from error

    backbone._compiled_call_impl = call


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
"""Seconds; importing torch takes most of them on a busy machine."""


def half_precision_problem(precision: str) -> str | None:
    """Why a CPU cannot train in `precision`, in words; None if it can."""
    if precision == "fp16":
        return "a CPU has no fast fp16"
    return trial_problem(COMMAND, TIMEOUT) if precision == "bf16" else None


@cache
def trial_problem(command: tuple[str, ...], timeout: float) -> str | None:
    """How a trial of bfloat16 in a child process failed; None if it did not.

    Some virtual machines advertise matrix instructions (AMX) that they do not have. The first bfloat16 convolution then kills
    the process with an illegal instruction, which no program can catch.
    """
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"a trial of bf16 on this CPU did not end within {timeout:g} s"
    except OSError as error:
        return f"a trial of bf16 on this CPU could not be started: {error.strerror}"
    if code < 0:
        return f"a trial of bf16 on this CPU was ended by {signal.Signals(-code).name}"
    return f"a trial of bf16 on this CPU failed with code {code}" if code else None


def describe_machine(runtime: Runtime) -> dict[str, Any]:
    """What a record says about the machine that its numbers come from."""
    import numpy
    import PIL

    return {
        "device": str(runtime.device),
        "processor": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # AVX2, AVX512...: other ones round differently
        "threads": torch.get_num_threads(),
        "spin_count": os.environ.get("GOMP_SPINCOUNT"),  # after so many turns a waiting thread sleeps; see __main__.py
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),  # PASSIVE: it sleeps at once
        "processes": runtime.processes.count,
        "compiled": runtime.compile,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "pillow": PIL.__version__,
        },
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The git commit of the source, with `+` if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
