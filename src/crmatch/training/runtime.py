"""Everything about the machine: device, precision, threads, versions."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from crmatch.errors import RequestError
from crmatch.processes import ALONE, Processes
from crmatch.training.half_precision import half_precision_problem

logger = logging.getLogger(__name__)
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
    processes: Processes = ALONE
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
    device: str = "auto",
    precision: str = "fp32",
    processes: Processes = ALONE,
    *,
    compile: bool = False,
    recompute: bool = False,
) -> Runtime:
    """The runtime asked for; `auto` takes a GPU where there is one, and each of several processes its own."""
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
