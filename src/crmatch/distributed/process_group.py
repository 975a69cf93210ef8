"""One run on several processes: rank and world size, data-parallel passes, all-gather and all-reduce.

The backbone and the augmentation are data-parallel: each rank computes its rows of the batch, and the results are
all-gathered. Heads, masks, running state and loss are replicated: every rank computes them on the full batch, so they are the
same as with one process.

Gradients: the backward pass of all-gather scales by the world size, and gradients are then averaged over ranks. So
data-parallel parameters (each rank has a part of the sum) and replicated ones (each rank has all of it) both get the gradient
of the full batch.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from crmatch.errors import LostProcessError, RequestError

TIMEOUT = 600.0
"""Seconds without an answer after which another rank is considered lost; a rank that dies is noticed at once."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class ProcessGroup:
    """Rank and world size. With one process every method is a no-op."""

    rank: int = 0  # rank 0 writes all files
    count: int = 1  # the world size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def local_rows(self, rows: int) -> slice:
        """The rows of this rank: r n / N to (r + 1) n / N, for rank r of N."""
        return slice(self.rank * rows // self.count, (self.rank + 1) * rows // self.count)

    def all_gather_rows(self, values: Tensor, rows: int) -> Tensor:
        """All-gather: all `rows` rows from the local rows of each rank, without gradient."""
        if self.count == 1:
            return values
        sizes = [len(range(rows)[replace(self, rank=rank).local_rows(rows)]) for rank in range(self.count)]
        mine = values.new_zeros((max(sizes), *values.shape[1:]))
        mine[: len(values)] = values
        parts = [torch.empty_like(mine) for _ in sizes]
        _exchange(dist.all_gather, parts, mine)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def run_data_parallel(
        self, function: Callable[[Tensor], Tensor | tuple[Tensor, Tensor]], values: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Data-parallel `function(values)`: each rank computes its rows of (N, ...) `values`, and all ranks get all rows."""
        if self.count == 1:
            return function(values)
        outputs = function(_Split.apply(values, self))  # type: ignore[no-untyped-call]

        def gather(rows: Tensor) -> Tensor:
            gathered: Tensor = _Gather.apply(rows, self, len(values))  # type: ignore[no-untyped-call]
            return gathered

        return gather(outputs) if isinstance(outputs, Tensor) else (gather(outputs[0]), gather(outputs[1]))

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """All-reduce: the sum of `values` over ranks, without gradient."""
        if self.count > 1:
            values = values.detach().clone()
            _exchange(dist.all_reduce, values)
        return values

    def sum(self, number: int) -> int:
        """The sum of `number` over ranks; exchanged on the CPU, so that nothing waits for the GPU."""
        return number if self.count == 1 else int(self.all_reduce_sum(torch.tensor(number)))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.sum(int(flag)))

    def same(self, number: int) -> bool:
        """Whether all ranks have the same `number`."""
        return bool((self.all_gather_rows(torch.tensor([number]), self.count) == number).all())

    def main_first(self, action: Callable[[], Result]) -> Result:
        """Run `action()` on rank 0, then on the others, which find what rank 0 has written."""
        if not self.is_main:
            self.sum(0)
        result = action()
        if self.is_main:
            self.sum(0)
        return result

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average every gradient over ranks, in one all-reduce."""
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = self.all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients])).div_(self.count)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)])


SINGLE_PROCESS = ProcessGroup()


def join(environment: Mapping[str, str] = os.environ, timeout: float = TIMEOUT) -> ProcessGroup:
    """Join the processes that `torchrun` started, by gloo (CPU) or NCCL (GPU); without torchrun there is one process.

    Raises:
        RequestError: the environment names a world size but no address.
        LostProcessError: a rank did not join.
    """
    count = int(environment.get("WORLD_SIZE", "1"))
    if count == 1:
        return SINGLE_PROCESS
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]:
        command = "torchrun --nproc-per-node N -m crmatch train ..."
        raise RequestError(f"WORLD_SIZE is {count}, but {', '.join(missing)} are not set.\nStart the processes with {command}")
    if not dist.is_initialized():
        gpus = torch.cuda.is_available() and dist.is_nccl_available()
        if gpus:
            torch.cuda.set_device(int(environment.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        _exchange(_meet, backend, environment.get("TORCHELASTIC_RESTART_COUNT", "0"), timedelta(seconds=timeout))
        atexit.register(dist.destroy_process_group)
    return ProcessGroup(dist.get_rank(), dist.get_world_size())


def _meet(backend: str, attempt: str, timeout: timedelta) -> None:
    """Form the process group. Addresses of an earlier attempt are still in torchrun's store, so each has its own part of it."""
    store, rank, count = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(f"attempt{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)


def _exchange(operation: Callable[..., Any], *values: Any, **choices: Any) -> None:
    """A collective operation; its failure becomes a `LostProcessError`."""
    try:
        operation(*values, **choices)
    except RuntimeError as error:
        reason = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).split(". ")[0]
        raise LostProcessError(
            f"another process of this run ended or does not respond ({reason}).\n"
            "The last checkpoint is intact: run the same command again to resume, with any number of processes."
        ) from error


class _Split(torch.autograd.Function):
    """All rows -> local rows; backward all-gathers the gradients and divides by the world size (see the module)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, processes: ProcessGroup) -> Tensor:
        ctx.processes, ctx.rows = processes, len(values)
        return values[processes.local_rows(len(values))].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.processes.all_gather_rows(gradient, ctx.rows) / ctx.processes.count, None


class _Gather(torch.autograd.Function):
    """Local rows -> all rows; backward keeps the gradient of the local rows times the world size (see the module)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, processes: ProcessGroup, rows: int) -> Tensor:
        ctx.processes = processes
        return processes.all_gather_rows(values, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.processes.local_rows(len(gradient))] * ctx.processes.count, None, None
