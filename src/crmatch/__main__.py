"""The command `crmatch`, also as `python -m crmatch`: signals are caught before anything else is imported."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from crmatch.runs.signals import catch_signals

SPIN = {"GOMP_SPINCOUNT": "1000"}
SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}


def main() -> None:
    """Run a command."""
    catch_signals()
    # By default, threads that wait for each other spin for milliseconds, and beside a busy program a step takes 3.5 times
    # as long (docs/quick-recipe.md). OpenMP reads these variables when torch is imported.
    if not os.environ.keys() & {*SPIN, *SLEEP}:
        os.environ.update(SLEEP if cores_are_short() else SPIN)
    from crmatch.cli.app import main as run_command

    run_command()


def cores_are_short(load: Path = Path("/proc/loadavg"), looks: int = 5) -> bool:
    """Whether other programs leave fewer cores than torch has threads, at each of several looks within 50 ms.

    False where the system does not say. With hyper-threading torch starts half as many threads as are counted here,
    so that they may sleep without need.
    """
    if not load.exists():
        return False  # not Linux
    with contextlib.suppress(OSError, ValueError, IndexError):
        threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        for _ in range(looks):
            # "0.53 0.41 0.30 2/513 4711": two of 513 threads on this machine run now, and one of them is this one.
            others = int(load.read_text().split()[3].partition("/")[0]) - 1
            if others + threads <= (os.cpu_count() or 1):
                return False
            time.sleep(0.01)
        return True
    return False


if __name__ == "__main__":
    main()
