"""`make crash-test`: 100 kills over runs of every method, 20 resumes of each; figures go to docs/results/survival.md."""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from crashes import INTERVAL, Forks, Kill, Lab
from survival_page import write_table

from crmatch.methods import METHODS

KILLS_PER_RUN, RESUMES_PER_RUN = 5, 5


def kill_many(lab: Lab, kills: int) -> list[Kill]:
    """Kill runs of one method after the other, at most `KILLS_PER_RUN` times each."""
    found: list[Kill] = []
    for method in itertools.cycle(METHODS):
        found += lab.kill_until_done(method, min(KILLS_PER_RUN, kills - len(found)))
        if len(found) == kills:
            return found
    raise AssertionError


def write_tables(kills: list[Kill], resumes: dict[str, list[int]], began: float) -> None:
    """The tables of two sections of docs/results/survival.md."""
    lost = [kill.reached - kill.saved for kill in kills]
    spread = collections.Counter(lost)
    rows: list[tuple[object, ...]] = [
        ("", ""),
        ("kills", len(kills)),
        ("before the first checkpoint", sum(kill.saved == 0 for kill in kills)),
        ("steps computed again, mean", f"{statistics.mean(lost):.1f}"),
        (f"steps computed again, maximum (checkpoints are {INTERVAL} steps apart)", max(lost)),
        ("kills by steps lost", ", ".join(f"{steps}: {spread[steps]}" for steps in sorted(spread))),
        ("different results", 0),
    ]
    write_table("kill -9 at random moments", "make crash-test", began, rows)
    methods = [(method, len(steps), 0) for method, steps in resumes.items()]
    write_table("Resumes at random steps", "make crash-test", began, [("method", "resumes", "different results"), *methods])


def main() -> None:
    """Run everything; raises at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--resumes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Forks() as forks:
        lab = Lab(forks, Path(folder), options.seed)
        kills = kill_many(lab, options.kills)
        runs = options.resumes // RESUMES_PER_RUN
        resumes = {method: [step for _ in range(runs) for step in lab.resume(method, RESUMES_PER_RUN)] for method in METHODS}
    write_tables(kills, resumes, began)
    print(f"{len(kills)} kills and {sum(map(len, resumes.values()))} resumes: every result was the same")


if __name__ == "__main__":
    main()
