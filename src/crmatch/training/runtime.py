"""Everything about the machine: device, precision, threads, versions."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from crmatch.errors import RequestError
from crmatch.processes import ALONE, Processes

logger = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Runtime:
    """Where and in which numbers a run computes."""

    device: torch.device
    dtype: torch.dtype
    processes: Processes = ALONE

    @property
    def host_sync_is_free(self) -> bool:
        """Whether reading a value back costs nothing, so that every loss can be checked at once."""
        return self.device.type == "cpu"


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next step instead of giving it back and asking anew; False elsewhere.

    Activations are large and live for one step; returning them costs a third of a small network's step time.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_MAX, 0))


def choose_runtime(device: str = "auto", precision: str = "fp32", processes: Processes = ALONE) -> Runtime:
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
    if chosen.type == "cpu" and keep_freed_memory():
        logger.debug("glibc keeps freed memory for the next step")
    return Runtime(chosen, DTYPES[precision], processes)


def describe_machine(runtime: Runtime) -> dict[str, Any]:
    """What a record says about where its numbers come from."""
    import numpy
    import PIL

    return {
        "device": str(runtime.device),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": runtime.processes.count,
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
