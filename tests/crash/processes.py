"""`make restarts`: ranks of torchrun are killed, and eight commands start at once; figures go to docs/results/survival.md."""

from __future__ import annotations

import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from survival_page import write_table

from conftest import TINY, options
from crmatch.runs.directory import RunDirectory
from finished import Result, result_of, stripes_in

KILLS, KILLS_PER_RUN, COMMANDS, STEPS = 20, 3, 8, 300
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(KILLS_PER_RUN)]


class Killed(NamedTuple):
    rank: int
    step: int  # the last one in the curves then


def command(folder: Path, out: str) -> list[str]:
    """A run on stripes, which takes some seconds, with a checkpoint every ten steps."""
    keys = {**TINY, "plan.steps": STEPS, "plan.evaluate_every": 50, "plan.log_every": 5, "plan.checkpoint_every": 10}
    places = ["--data-dir", str(folder / "data"), "--out", str(folder / out)]
    return ["-m", "crmatch", "train", "stripes@2", "--recipe=quick", *places, *options({**keys, "method.rotation_images": 4})]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], env=environment, **pipes)


def directory(folder: Path, out: str) -> RunDirectory:
    """The only run there."""
    (found,) = (folder / out).glob("*/*/*/spec.json")
    return RunDirectory(found.parent)


def ranks_of(torchrun: int) -> dict[int, int]:
    """Process id by rank."""
    found = {}
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {int(one[5:]): int(child) for one in environment if one.startswith(b"RANK=")}
    return found


def reached(folder: Path, out: str) -> int:
    """The last step in the curves of the only run there; 0 if there are none."""
    lines = [line for file in (folder / out).glob("*/*/*/metrics.jsonl") for line in RunDirectory(file.parent).read_metrics()]
    return int(lines[-1]["step"]) if lines else 0


def kill_ranks(folder: Path, out: str, source: random.Random, kills: int) -> list[Killed]:
    """Train with two processes and kill one of them up to `kills` times: after a random step, or while they start."""
    torchrun, found = start([*TORCHRUN, *command(folder, out)]), list[Killed]()
    killed: dict[int, int] = {}
    while torchrun.poll() is None and len(found) < kills:
        ranks = ranks_of(torchrun.pid)
        if len(ranks) < 2 or not killed.items().isdisjoint(ranks.items()):
            time.sleep(0.01)
            continue
        begins, step = time.monotonic(), source.choice([0, source.randrange(STEPS), source.randrange(STEPS)])
        wait, rank = source.uniform(0, 5 if step == 0 else 0.1), source.randrange(2)
        while torchrun.poll() is None and (reached(folder, out) < step or time.monotonic() < begins + wait):
            time.sleep(0.01)
        if torchrun.poll() is None:
            found.append(Killed(rank, reached(folder, out)))
            os.kill(ranks[rank], signal.SIGKILL)
            killed = ranks
    _, errors = torchrun.communicate(timeout=1200)
    assert torchrun.returncode == 0, errors
    return found


def start_at_once(folder: Path) -> collections.Counter[str]:
    """Eight processes train the same run: how often they ended in which way."""
    commands = [start(command(folder, "at-once")) for _ in range(COMMANDS)]
    ends = [(process.communicate(timeout=1200)[1], process.returncode) for process in commands]
    said = [f"{code}: {error.rpartition('crmatch: ')[2].partition(chr(10))[0]}" if code else "trained" for error, code in ends]
    return collections.Counter(said)


def main() -> None:
    began, source, kills = time.monotonic(), random.Random(0), list[Killed]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stripes_in(folder / "data")
        straight = start([*TORCHRUN, *command(folder, "straight")])
        _, errors = straight.communicate(timeout=1200)
        assert straight.returncode == 0, errors
        expected = result_of(directory(folder, "straight"))
        runs = 0
        while len(kills) < KILLS:
            runs += 1
            kills += kill_ranks(folder, f"killed{runs}", source, min(KILLS_PER_RUN, KILLS - len(kills)))
            found: Result = result_of(directory(folder, f"killed{runs}"))
            assert found == expected, f"another result after {kills[-KILLS_PER_RUN:]}"
            print(runs, kills, flush=True)
        ends = start_at_once(folder)
        print(ends)
        in_use = f"4: {directory(folder, 'at-once').path} is in use by another process."
        assert ends == {"trained": 1, in_use: COMMANDS - 1}, ends
    ranks = collections.Counter(kill.rank for kill in kills)
    rows: list[tuple[object, ...]] = [
        ("", ""),
        ("runs on two processes", runs),
        ("kills of rank 0, of rank 1", f"{ranks[0]}, {ranks[1]}"),
        ("kills before the first step", sum(kill.step == 0 for kill in kills)),
        ("different results", 0),
        (f"of {COMMANDS} commands at once: trained, refused with exit code 4", f"{ends['trained']}, {ends[in_use]}"),
    ]
    write_table("Dying processes", "make restarts", began, rows)


if __name__ == "__main__":
    main()
