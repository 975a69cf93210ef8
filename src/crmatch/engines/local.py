"""Run a list of specs until each has its record in the store. An engine decides where; the store is the run directories.

Every engine keeps these promises: a finished run is never repeated, a begun one is continued, a run that diverges or is in use
by another process is reported and does not stop the others, and a stop request saves what is running before it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from crmatch.errors import DivergedError, InUseError, ResumeError, StoppedError
from crmatch.runs.directory import RunDirectory
from crmatch.runs.signals import SIGNALS
from crmatch.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from crmatch.runs.experiment import Progress

POLL_SECONDS = 0.2
SAVED = "everything is saved.\nThe same command continues."


class RunOptions(NamedTuple):
    """Where runs and data lie, and how runs compute."""

    out: Path
    data_dir: Path | None = None
    device: str = "auto"
    recompute: bool = False


class RunOutcome(NamedTuple):
    """A run that an engine is done with; `problem` says why it has no record."""

    spec: RunSpec
    problem: str = ""


class Engine(Protocol):
    """Finishes runs, on this machine or on others that see the same store."""

    def train_all(self, specs: Sequence[RunSpec], ended: Callable[[RunOutcome], None], stop: Callable[[], bool]) -> None:
        """Train every spec to its record, calling `ended` after each; raises `StoppedError` once `stop()` is true."""


class InProcess(NamedTuple):
    """One run after the other in this process."""

    store: RunOptions
    watch: Callable[[RunSpec], AbstractContextManager[Progress]]
    """Who shows the progress of a run."""

    def train_all(self, specs: Sequence[RunSpec], ended: Callable[[RunOutcome], None], stop: Callable[[], bool]) -> None:
        """Train in the order given."""
        for done, spec in enumerate(specs):
            if stop():
                raise StoppedError(f"stopped with {len(specs) - done} runs left; {SAVED}")
            with self.watch(spec) as progress:
                ended(train_one(spec, self.store, stop, progress))


class WorkerProcesses(NamedTuple):
    """Several runs at once on this machine, each process with its share of the cores."""

    store: RunOptions
    jobs: int

    def train_all(self, specs: Sequence[RunSpec], ended: Callable[[RunOutcome], None], stop: Callable[[], bool]) -> None:
        """Train with `jobs` processes; a stop request reaches them through a shared flag."""
        context = multiprocessing.get_context("spawn")
        flag = context.Event()
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        waiting: set[Future[RunOutcome]] = set()
        with ProcessPoolExecutor(self.jobs, context, _begin_worker, (flag, threads)) as pool:
            try:
                waiting = {pool.submit(_train_in_worker, spec, self.store) for spec in specs}
                while waiting:
                    done, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
                    for future in done:
                        ended(future.result())
                    if stop() and not flag.is_set():
                        flag.set()
                        waiting = {future for future in waiting if not future.cancel()}
            except BrokenProcessPool as error:
                reason = "a worker process died (was it killed, or the memory full?)"
                raise ResumeError(
                    f"{reason}; finished runs are kept.\nThe same command continues; use fewer --jobs."
                ) from error
            except SystemExit:  # a second signal: at once
                for process in multiprocessing.active_children():
                    process.kill()
                raise
            finally:
                flag.set()
                _cancel(waiting)
        if stop():
            raise StoppedError(f"stopped with runs left; {SAVED}")


def train_one(
    spec: RunSpec, store: RunOptions, stop: Callable[[], bool], progress: Progress | None = None, patience: float = 0
) -> RunOutcome:
    """Train one spec to its record; what concerns this run alone becomes its problem.

    Args:
        spec: what to train.
        store: where it lies.
        stop: asked before every step.
        progress: who watches.
        patience: seconds to wait for another process that has the run's directory.
    """
    from crmatch.runs.run import run

    watched: dict[str, Any] = {"progress": progress, "stop": stop}
    latest = time.monotonic() + patience
    while True:
        try:
            run(spec, store.out, data_dir=store.data_dir, device=store.device, recompute=store.recompute, **watched)
        except DivergedError as error:
            return RunOutcome(spec, f"diverged: {str(error).splitlines()[0]}")
        except ResumeError as error:
            if isinstance(error, InUseError) and time.monotonic() < latest and not stop():
                time.sleep(1)
                continue
            return RunOutcome(spec, str(error).splitlines()[0])
        return RunOutcome(spec)


def set_aside(directory: RunDirectory) -> Path | None:
    """Rename a run's directory to the first free `<name>.old<k>`, so that it is trained anew; None where there is none."""
    from filelock import FileLock, Timeout

    if not directory.path.exists():
        return None
    try:
        with FileLock(directory.lock, timeout=0):
            number = 1
            while (aside := directory.aside(number)).exists():
                number += 1
            directory.path.rename(aside)
    except Timeout as error:
        raise InUseError(
            f"{directory.path} is in use by another process.\nWait until it ends, or choose another --out."
        ) from error
    return aside


class _Worker(NamedTuple):
    """What a worker process knows of its parent."""

    flag: Event
    training: threading.Lock
    """Held while a run trains or saves."""


_worker: _Worker | None = None


def _begin_worker(flag: Event, threads: int) -> None:
    """Signals are the parent's business; each worker has its share of the cores."""
    import torch

    global _worker
    _worker = _Worker(flag, threading.Lock())
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, args=(_worker,), daemon=True).start()


def _end_with_parent(worker: _Worker) -> None:
    """Where the parent is gone, nobody will ever ask this process to end: save what is running, then leave."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    worker.flag.set()
    with worker.training:
        os._exit(StoppedError.exit_code)


def _train_in_worker(spec: RunSpec, store: RunOptions) -> RunOutcome:
    assert _worker is not None
    with _worker.training:
        return train_one(spec, store, _worker.flag.is_set)


def _cancel(futures: set[Future[RunOutcome]]) -> None:
    for future in futures:
        future.cancel()
