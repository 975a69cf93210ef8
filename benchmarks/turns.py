"""Compare programs on a noisy machine: all are started, then work in turns, one unit of work at a time.

A program (contender) prints `ready` after its set-up. For every line it then reads, it does one unit of work and prints the
seconds that this took. A slow minute of the machine thus affects all programs, and results are the ratios within a round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Seconds = dict[str, list[float]]
PATIENCE = 60


def serve(work: Callable[[], object]) -> None:
    """Act as a contender: do one unit of work per line of standard input."""
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        work()
        print(time.perf_counter() - started, flush=True)


class Contender:
    """A started program that waits for its turn."""

    def __init__(self, command: Sequence[str]) -> None:
        self.started = time.perf_counter()
        self.process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        while self._line() != "ready":
            pass
        self.seconds_to_ready = time.perf_counter() - self.started

    def work(self) -> float:
        """Let it do one unit of work; returns the seconds that it measured."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._line())

    def end(self) -> None:
        """Close its input, which ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args!r} ended with exit code {self.process.wait()}")
        return line.strip()


@contextmanager
def contenders(commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Contender]]:
    """Start all of `commands` and wait until they are ready; end them on exit."""
    started: dict[str, Contender] = {}
    try:
        for name, command in commands.items():
            started[name] = Contender(command)
        yield started
    finally:
        for contender in started.values():
            contender.end()


def take_turns(work: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 2) -> Seconds:
    """Seconds per round and contender."""
    seconds: Seconds = {name: [] for name in work}
    for number in range(warmup + rounds):
        for name, unit in work.items():
            spent = unit()
            if number >= warmup:
                seconds[name].append(spent)
    return seconds


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """`work` as a unit for `take_turns` within this process."""

    def unit() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return unit


def times_faster(seconds: Seconds, name: str, than: str) -> tuple[float, float, float]:
    """Median over rounds of the ratio of seconds, and its quartiles."""
    ratios = [theirs / ours for theirs, ours in zip(seconds[than], seconds[name], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return middle, low, high


class PeakMemory:
    """Peak of a program's memory, summed over all its processes and sampled.

    Attributes:
        peak: shared pages counted once (PSS), in bytes.
        resident: shared pages counted for every process that maps them (RSS).
    """

    def __init__(self, process: int, interval: float = 0.25) -> None:
        self.process, self.interval, self.peak, self.resident = process, interval, 0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._end.wait(self.interval):
            sizes = [_sizes(member) for member in _family(self.process)]
            self.peak = max(self.peak, sum(size["Pss"] for size in sizes))
            self.resident = max(self.resident, sum(size["Rss"] for size in sizes))


def _family(process: int) -> list[int]:
    """The process and all its descendants."""
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [process]
    return [process, *(member for child in children for member in _family(child))]


def _sizes(process: int) -> dict[str, int]:
    """Rss and Pss of a process in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        lines = []
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss:", "Rss:"))}
    return {"Pss": 0, "Rss": 0, **found}
