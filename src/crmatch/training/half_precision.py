"""Whether this CPU computes in half precision, found out by a process that may die of it.

Some virtual machines advertise matrix instructions (AMX) that they do not have: the first convolution in bfloat16 then ends the
process with an illegal instruction, which no program can catch.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys

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
