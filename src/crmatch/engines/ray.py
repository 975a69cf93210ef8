"""Runs as tasks of a Ray cluster: `crmatch table ... --engine ray`. The run directories are the only state.

Ray decides where a run trains and starts it again elsewhere when its worker or node dies; that it then continues instead of
beginning anew is the run directory's doing. So nothing here remembers anything, and a driver that is killed loses nothing.
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
from crmatch.data.settings import default_data_dir
from crmatch.engines.local import POLL_SECONDS, SAVED, RunOptions, RunOutcome, train_one
from crmatch.errors import CRMatchError, RequestError, StoppedError
from crmatch.runs.signals import SIGNALS
from crmatch.spec.run_spec import NUMERICS, RunSpec, parse_spec

RETRIES = 5
"""How often a run is started again after its worker or its node died."""
PATIENCE_SECONDS = 60.0
"""How long a run waits for its directory: a process that was killed may hold it until the system has noticed."""
CONNECT_SECONDS = 10.0
CANCEL_SECONDS = 2.0
"""Runs are asked to save again after this time: one may just have moved to another worker."""
OBJECT_STORE_BYTES = 80_000_000
"""The least Ray accepts; a task gets and returns a few lines of text."""


class RayTasks(NamedTuple):
    """Each run a task of a Ray cluster: the one at `address`, else one of this machine that ends with the command."""

    store: RunOptions
    address: str | None = None
    jobs: int | None = None
    """Runs at once; None: as many as the cluster has room for."""
    cpus: int = 1
    """Cores of each run, which computes with as many threads. On a cluster with GPUs it gets one of them, too."""

    def train_all(self, specs: Sequence[RunSpec], ended: Callable[[RunOutcome], None], stop: Callable[[], bool]) -> None:
        """Train wherever there is room; a stop request reaches the tasks as their cancellation."""
        ray = need_ray(self.address)
        left = deque(specs)
        running: dict[Any, RunSpec] = {}
        with _connected(ray, self.address):
            task = ray.remote(**self._resources(ray), max_retries=RETRIES)(_train_in_task)
            try:
                while left or running:
                    if stop():
                        raise StoppedError(f"stopped with {len(left) + len(running)} runs left; {SAVED}")
                    while left and len(running) < (self.jobs or len(specs)):
                        spec = left.popleft()
                        running[task.remote(self._request(spec))] = spec
                    done, _ = ray.wait(list(running), timeout=POLL_SECONDS)
                    for reference in done:
                        ended(_outcome(ray, reference, running.pop(reference)))
            except Exception:
                _save(ray, list(running))
                raise

    def _resources(self, ray: Any) -> dict[str, float]:
        """What a task asks for; more than any node has would wait forever."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        if self.cpus > most:
            found = f"the largest node of the Ray cluster has {most}"
            raise RequestError(f"--cpus-per-run {self.cpus}: {found}.\nUse --cpus-per-run {max(most, 1)}.")
        gpu = self.store.device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes)
        return {"num_cpus": self.cpus, "num_gpus": 1 if gpu else 0}

    def _request(self, spec: RunSpec) -> str:
        """What a task has to know, as JSON. Its process may stand in another directory, so paths are absolute."""
        out, data_dir, device, recompute = self.store
        values = {
            "version": _version(),
            "spec": spec.to_json(),
            "out": str(out.absolute()),
            "data_dir": str((data_dir or default_data_dir()).absolute()),
            "device": device,
            "recompute": recompute,
            "threads": self.cpus,
        }
        return json.dumps(values)


def need_ray(address: str | None = None) -> Any:
    """The module `ray`, which only this engine needs, once something answers at `address`: Ray itself would try for minutes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
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
    """Be the driver of a cluster.

    Signals stay with who had them, and stdout is for the table alone: Ray takes SIGTERM for itself, and says on stdout that a
    worker died.
    """
    local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else local))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _unreachable(address, error) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    with redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            ray.shutdown()


def _unreachable(address: str | None, error: Exception) -> RequestError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if address is None:
        return RequestError(f"a Ray cluster of this machine does not start: {reason}.\nUse --jobs, which needs no Ray.")
    advice = "Write --ray-address HOST:PORT as ray start said it, or auto"
    return RequestError(f"no Ray cluster answers at {address}: {reason}.\n{advice}.")


def _outcome(ray: Any, reference: Any, spec: RunSpec) -> RunOutcome:
    """What became of a task; failures that concern all runs are raised as in this process."""
    try:
        return RunOutcome(spec, ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, CRMatchError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = f"{type(error).__name__} after {RETRIES} retries"
        return RunOutcome(spec, f"Ray gave up on it: {reason} (were its workers killed, or the memory full?)")


def _save(ray: Any, running: list[Any]) -> None:
    """Ask the running tasks to save and wait until they have; those that did not begin yet will not."""
    while running:
        for reference in running:
            ray.cancel(reference)
        _, running = ray.wait(running, num_returns=len(running), timeout=CANCEL_SECONDS)


def _version() -> str:
    return f"{crmatch.__version__} (numerics {NUMERICS})"


def _train_in_task(request: str) -> str:
    """Train one run in a worker of the cluster; returns its problem.

    Ray cancels a running task by SIGINT, which here asks the run to save and end.
    """
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    values = json.loads(request)
    if values["version"] != _version():
        raise RequestError(
            f"the node {os.uname().nodename} has crmatch {_version()}, the command {values['version']}.\n"
            "Install the same version on every node."
        )
    import torch

    torch.set_num_threads(values["threads"])
    store = RunOptions(Path(values["out"]), Path(values["data_dir"]), values["device"], values["recompute"])
    return train_one(parse_spec(values["spec"]), store, stop.is_set, patience=PATIENCE_SECONDS).problem
