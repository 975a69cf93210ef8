"""Runs as tasks of a Ray cluster: `crmatch table ... --engine ray`.

Ray decides where a run trains and starts it again elsewhere if its worker or node dies; it then resumes from its directory.
The run directories are the only state, so nothing is lost if this process is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import crmatch
from crmatch.engines.local import POLL_SECONDS, SAVED, RunOutcome, train_one
from crmatch.errors import CRMatchError, RequestError, StoppedError
from crmatch.own_code import name_file, named_files
from crmatch.runs.signals import SIGNALS
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import NUMERICS, RunSpec, parse_spec
from crmatch.training.execution import Execution

VERSION = f"{crmatch.__version__} (numerics {NUMERICS})"
RETRIES = 5  # how often a run is started again after its worker or its node died
PATIENCE_SECONDS = 60.0  # to wait for a run's directory: a killed process may hold the lock until the system has noticed
CONNECT_SECONDS = 10.0
CANCEL_SECONDS = 2.0  # until tasks are cancelled again: one may just have moved to another worker
OBJECT_STORE_BYTES = 80_000_000  # the least that Ray accepts; a task receives and returns a few lines of text


class RayTasks(NamedTuple):
    """Each run is a task of the Ray cluster at `address`, or of a cluster on this machine that ends with the command."""

    workspace: Workspace
    execution: Execution
    address: str | None = None
    jobs: int | None = None  # runs at once; None: as many as the cluster has room for
    cpus: int = 1  # cores, and threads, of each run; on a cluster with GPUs a run also gets one of them

    def train_all(self, specs: Sequence[RunSpec], ended: Callable[[RunOutcome], None], stop: Callable[[], bool]) -> None:
        """Train wherever there is room; a stop request cancels the tasks, which then save."""
        ray = need_ray(self.address)
        waiting = deque(specs)
        running: dict[Any, RunSpec] = {}
        with _connected(ray, self.address):
            task = ray.remote(**self._resources(ray), max_retries=RETRIES)(_train_in_task)
            try:
                while waiting or running:
                    while waiting and len(running) < (self.jobs or len(specs)):
                        spec = waiting.popleft()
                        running[task.remote(self._request(spec))] = spec
                    done, _ = ray.wait(list(running), timeout=POLL_SECONDS)
                    for reference in done:
                        ended(_outcome(ray, reference, running.pop(reference)))
                    if (left := len(waiting) + len(running)) and stop():
                        raise StoppedError(f"stopped with {left} runs left; {SAVED}")
            except Exception:
                _cancel(ray, list(running))
                raise

    def _resources(self, ray: Any) -> dict[str, float]:
        """What a task asks for; if no node has as much, Ray would wait forever."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        if self.cpus > most:
            found = f"the largest node of the Ray cluster has {most}"
            raise RequestError(f"--cpus-per-run {self.cpus}: {found}.\nUse --cpus-per-run {max(most, 1)}.")
        gpu = self.execution.device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
        return {"num_cpus": self.cpus, "num_gpus": 1 if gpu else 0}

    def _request(self, spec: RunSpec) -> str:
        """What a task needs to know, as JSON. Its process may run in another directory, so paths are absolute."""
        places = [str(self.workspace.out.absolute()), str(self.workspace.data_dir.absolute())]
        values = {"version": VERSION, "spec": spec.to_json(), "workspace": places, "execution": self.execution}
        return json.dumps({**values, "threads": self.cpus, "code": named_files()})


def need_ray(address: str | None = None) -> Any:
    """The module `ray`, if it is installed and something answers at `address` (Ray itself would try for minutes)."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise RequestError("--engine ray needs Ray, which is not installed.\npip install 'crmatch[ray]'") from error
    if address not in (None, "auto"):
        host, _, port = address.rpartition("://")[2].rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except (OSError, ValueError, OverflowError) as error:
            raise _unreachable(address, error) from error
    return ray


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else local))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _unreachable(address, error) from error
    finally:  # Ray installs a handler of its own for SIGTERM
        for number, handler in handlers.items():
            signal.signal(number, handler)
    with redirect_stdout(sys.stderr):  # stdout is for the table; Ray prints there that a worker died
        try:
            yield
        finally:
            ray.shutdown()


def _unreachable(address: str | None, error: Exception) -> RequestError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if address is None:
        return RequestError(f"a Ray cluster of this machine does not start: {reason}.\nUse --jobs, which needs no Ray.")
    advice = "Write --ray-address HOST:PORT as printed by ray start, or auto"
    return RequestError(f"no Ray cluster answers at {address}: {reason}.\n{advice}.")


def _outcome(ray: Any, reference: Any, spec: RunSpec) -> RunOutcome:
    """The outcome of a task; failures that concern all runs are raised as in this process."""
    try:
        return RunOutcome(spec, ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, CRMatchError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = f"{type(error).__name__} after {RETRIES} retries"
        return RunOutcome(spec, f"Ray gave up on it: {reason} (were its workers killed, or the memory full?)")


def _cancel(ray: Any, running: list[Any]) -> None:
    """Ask the running tasks to save and wait until they have; waiting tasks will not start."""
    while running:
        for reference in running:
            ray.cancel(reference)
        _, running = ray.wait(running, num_returns=len(running), timeout=CANCEL_SECONDS)


def _train_in_task(request: str) -> str:
    """Train one run in a worker of the cluster; returns its problem."""
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # Ray cancels a running task by SIGINT
    values = json.loads(request)
    if values["version"] != VERSION:
        found = f"the node {os.uname().nodename} has crmatch {VERSION}, the command {values['version']}"
        raise RequestError(f"{found}.\nInstall the same version on every node.")
    import torch

    torch.set_num_threads(values["threads"])
    out, data_dir = map(Path, values["workspace"])
    workspace, execution = Workspace(out, data_dir), Execution(*values["execution"])
    for file in values["code"]:
        name_file(file)
    return train_one(parse_spec(values["spec"]), workspace, execution, stop.is_set, patience=PATIENCE_SECONDS).problem
