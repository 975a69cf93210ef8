"""Engines train a list of specs until each has its record; this module has those that train on this machine.

The run directories are the only state. Every engine keeps these promises: a finished run is never repeated; a started one is
resumed; a run that diverges, cannot be resumed or is in use by another process is reported and does not stop the others; and a
stop request saves what is running before the engine ends.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

from crmatch.errors import CRMatchError, DataError, DivergedError, InUseError, RequestError, ResumeError, StoppedError
from crmatch.runs.directory import train_command
from crmatch.runs.signals import PARENT
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec
from crmatch.training.execution import Execution

if TYPE_CHECKING:
    from crmatch.runs.experiment import Progress

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.2
SAVED = "everything is saved.\nResume with the same command."
CONCERN_ALL: dict[int, type[CRMatchError]] = {error.exit_code: error for error in (RequestError, DataError, StoppedError)}


class RunOutcome(NamedTuple):
    """A run that an engine is done with; `problem` says why it has no record."""

    spec: RunSpec
    problem: str = ""


class Engine(Protocol):
    """Trains runs, on this machine or on others that see the same directories."""

    def train_all(self, specs: Sequence[RunSpec], ended: Callable[[RunOutcome], None], stop: Callable[[], bool]) -> None:
        """Train every spec to its record and call `ended` after each; raises `StoppedError` if `stop()` left runs untrained."""


class InProcess(NamedTuple):
    """One run after the other in this process."""

    workspace: Workspace
    execution: Execution
    watch: Callable[[RunSpec], AbstractContextManager[Progress]]  # shows the progress of a run

    def train_all(self, specs: Sequence[RunSpec], ended: Callable[[RunOutcome], None], stop: Callable[[], bool]) -> None:
        """Train in the order given."""
        for done, spec in enumerate(specs):
            if stop():
                raise StoppedError(f"stopped with {len(specs) - done} runs left; {SAVED}")
            with self.watch(spec) as progress:
                outcome = train_one(spec, self.workspace, self.execution, stop, progress)
            ended(outcome)


class WorkerProcesses(NamedTuple):
    """Several runs at once on this machine: each is a `crmatch train` command with its share of the cores."""

    workspace: Workspace
    execution: Execution
    jobs: int

    def train_all(self, specs: Sequence[RunSpec], ended: Callable[[RunOutcome], None], stop: Callable[[], bool]) -> None:
        """Keep `jobs` commands running; after a stop request or a failure let them save, and start no more."""
        waiting, running, left, ending = deque(specs), list[_Worker](), 0, False
        failure: CRMatchError | None = None
        try:
            while running or (waiting and not ending):
                if not ending and (failure or stop()):
                    ending = True
                    for worker in running:  # once: a second signal would end it before it has saved
                        worker.process.terminate()
                while waiting and len(running) < self.jobs and not ending:
                    running.append(self._start(waiting.popleft()))
                time.sleep(POLL_SECONDS)
                for worker in [worker for worker in running if worker.process.poll() is not None]:
                    running.remove(worker)
                    try:
                        ended(worker.outcome())
                    except StoppedError:
                        left += 1
                    except CRMatchError as error:
                        failure = failure or error
        finally:  # a second signal has raised SystemExit
            for worker in running:
                worker.process.kill()
                worker.process.wait()
        if failure:
            raise failure
        if left := left + len(waiting):
            raise StoppedError(f"stopped with {left} runs left; {SAVED}")

    def _start(self, spec: RunSpec) -> _Worker:
        options = ["--no-baseline", "--json", *self.workspace.options(), *self.execution.options()]
        command = shlex.split(train_command(spec, self.workspace.setting_of(spec), *options))
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        messages = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `outcome`)
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())},
            start_new_session=True,  # so that Ctrl-C reaches this process only, which tells the others
        )
        return _Worker(spec, process, messages)


class _Worker(NamedTuple):
    spec: RunSpec
    process: subprocess.Popen[bytes]
    messages: IO[bytes]

    def outcome(self) -> RunOutcome:
        """The outcome of the ended process; errors that concern all runs are raised, as in this process."""
        with self.messages as file:
            file.seek(0)
            said = file.read().decode(errors="replace").strip()
        code = self.process.returncode
        warnings, _, message = said.rpartition("crmatch: ") if code else (said, "", "")
        if code == -signal.SIGTERM:  # it was told to stop before it could catch the signal
            raise StoppedError(message)
        if code in CONCERN_ALL:
            raise CONCERN_ALL[code](message)
        if code not in (0, ResumeError.exit_code, DivergedError.exit_code):
            reason = "died (was it killed, or the memory full?)" if code < 0 else f"failed with code {code}: {said}"
            advice = "Resume with the same command; use fewer --jobs."
            raise ResumeError(f"a worker process {reason}; finished runs are kept.\n{advice}")
        if warnings.strip():
            logger.warning("%s", warnings.strip())
        problem = message.partition("\n")[0]
        return RunOutcome(self.spec, f"diverged: {problem}" if code == DivergedError.exit_code else problem)


def train_one(
    spec: RunSpec,
    workspace: Workspace,
    execution: Execution,
    stop: Callable[[], bool],
    progress: Progress | None = None,
    patience: float = 0,
) -> RunOutcome:
    """Train one spec to its record in this process; an error that concerns this run alone becomes its problem.

    `patience` is how many seconds to wait for another process that uses the run's directory.
    """
    from crmatch.runs.run import run

    latest = time.monotonic() + patience
    while True:
        try:
            run(spec, workspace, execution, progress=progress, stop=stop)
        except DivergedError as error:
            return RunOutcome(spec, f"diverged: {str(error).splitlines()[0]}")
        except ResumeError as error:
            if isinstance(error, InUseError) and time.monotonic() < latest and not stop():
                time.sleep(1)
                continue
            return RunOutcome(spec, str(error).splitlines()[0])
        return RunOutcome(spec)
