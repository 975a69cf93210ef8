"""`make crash-test`: 100 kills over runs of every method, 20 resumes of each; figures go to docs/results/survival.md."""

from __future__ import annotations

import argparse
import collections
import itertools
import platform
import statistics
import tempfile
import time
from pathlib import Path

from crashes import INTERVAL, STEPS, Forks, Kill, Lab

from crmatch.methods import METHODS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "survival.md"
KILLS_PER_RUN, RESUMES_PER_RUN = 5, 5


def kill_many(lab: Lab, kills: int) -> list[Kill]:
    """Kill runs of one method after the other, at most `KILLS_PER_RUN` times each."""
    found: list[Kill] = []
    for method in itertools.cycle(METHODS):
        found += lab.kill_until_done(method, min(KILLS_PER_RUN, kills - len(found)))
        if len(found) == kills:
            return found
    raise AssertionError


def page(kills: list[Kill], resumes: dict[str, list[int]], seed: int, seconds: float) -> str:
    """What docs/results/survival.md says."""
    lost = [kill.reached - kill.saved for kill in kills]
    unsaved = sum(kill.saved == 0 for kill in kills)
    spread = collections.Counter(lost)
    return "\n".join(
        [
            "# Kills and resumes",
            "",
            f"Written by `make crash-test` (seed {seed}, {seconds / 60:.0f} minutes on {platform.machine()}).",
            f"Runs of {STEPS} steps on a tiny set with CTAugment, with a checkpoint every {INTERVAL} steps. Every run that was",
            "killed or stopped was resumed, finished and compared with an uninterrupted run. The last checkpoint, the model",
            "file, the curves and the record must be bit-identical, except for times. The command fails at the first",
            "difference and then writes no page.",
            "",
            "## kill -9 at random moments",
            "",
            "| | |",
            "|---|---|",
            f"| kills | {len(kills)} |",
            f"| before the first checkpoint | {unsaved} |",
            f"| steps computed again, mean | {statistics.mean(lost):.1f} |",
            f"| steps computed again, maximum (checkpoints are {INTERVAL} steps apart) | {max(lost)} |",
            f"| kills by steps lost | {', '.join(f'{steps}: {spread[steps]}' for steps in sorted(spread))} |",
            "| different results | 0 |",
            "",
            "## Resumes at random steps",
            "",
            "| method | resumes | different results |",
            "|---|---|---|",
            *(f"| {method} | {len(steps)} | 0 |" for method, steps in resumes.items()),
            "",
        ]
    )


def main() -> None:
    """Run everything; raises at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--resumes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Forks() as forks:
        lab = Lab(forks, Path(folder), options.seed)
        kills = kill_many(lab, options.kills)
        runs = options.resumes // RESUMES_PER_RUN
        resumes = {method: [step for _ in range(runs) for step in lab.resume(method, RESUMES_PER_RUN)] for method in METHODS}
    options.out.write_text(page(kills, resumes, options.seed, time.perf_counter() - began))
    print(f"{len(kills)} kills and {sum(map(len, resumes.values()))} resumes: every result was the same; see {options.out}")


if __name__ == "__main__":
    main()
