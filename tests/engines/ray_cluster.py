"""A Ray cluster of several nodes on this machine, whose processes can be killed like those of a real one."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]


def wait_for(condition: Callable[[], object], meanwhile: subprocess.Popen[str] | None = None) -> None:
    """Wait up to two minutes for something to happen, as long as the process that makes it happen is there."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        assert meanwhile is None or meanwhile.poll() is None, meanwhile.communicate()
        time.sleep(0.02)


class Cluster:
    """Nodes with one core each; the first is the head. A node is a session of processes, which is how they are found."""

    def __init__(self, nodes: int = 2) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")  # sockets need short paths
        self._count = nodes
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        token = Path(self._folder.name) / "token"
        token.write_text(secrets.token_hex(16))
        unset = {"PYTEST_CURRENT_TEST", "RAY_ADDRESS"}
        self._environment = {
            **{key: value for key, value in os.environ.items() if key not in unset},
            **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"},
            "OMP_NUM_THREADS": "1",
        }
        self._drivers: list[subprocess.Popen[str]] = []
        self.address = ""

    def __enter__(self) -> Self:
        try:
            self.start(0)
            known = Path(self._folder.name) / "ray_current_cluster"
            wait_for(lambda: known.exists() and known.read_text())
            self.address = known.read_text().strip()
            for node in range(1, self._count):
                self.start(node)
            wait_for(lambda: all("raylet" in self._titles(node) for node in self._started))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for driver in self._drivers:
            driver.kill()
            driver.communicate()
        for node in reversed(list(self._started)):
            self.kill(node)
        self._folder.cleanup()

    def start(self, node: int) -> None:
        """Start a node, or start it again."""
        folder = self._folder.name
        head = ["--head", "--port=0", f"--temp-dir={folder}", "--include-dashboard=false"]
        role = [f"--address={self.address}"] if node else head
        limits = ["--num-cpus=1", "--object-store-memory=80000000"]
        with open(f"{folder}/node{node}.log", "ab") as log:
            command = [*RAY, "start", *role, *limits, "--block", "--disable-usage-stats"]
            pipes = (subprocess.DEVNULL, log, log)
            self._started[node] = subprocess.Popen(command, -1, None, *pipes, env=self._environment, start_new_session=True)

    def drive(self, command: list[str], folder: Path) -> subprocess.Popen[str]:
        """Start a command that connects to the cluster, in `folder`; it ends with the cluster at the latest."""
        folder.mkdir(exist_ok=True)
        pipes = (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
        driver = subprocess.Popen(command, -1, None, *pipes, cwd=folder, env=self._environment, text=True)
        self._drivers.append(driver)
        return driver

    def kill(self, node: int) -> None:
        """What a power cut does: every process of the node ends at once."""
        while processes := self.processes(node):
            for number in processes:
                _kill(number)
            self._started[node].poll()
            time.sleep(0.05)
        self._started.pop(node).wait()

    def training(self, *nodes: int) -> list[int]:
        """The processes of these nodes, or of all, that have a task."""
        return [
            number
            for node in nodes or self._started
            for number, title in self.processes(node).items()
            if title.startswith("ray::_train_in_task")
        ]

    def processes(self, node: int) -> dict[int, str]:
        """Number and title of every process of a node that has not ended."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._started[node].pid and state != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def _titles(self, node: int) -> str:
        return " ".join(self.processes(node).values())


def _kill(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)
