"""The command `crmatch`, also as `python -m crmatch`: signals are caught before anything else is imported."""

from __future__ import annotations

import os

from crmatch.runs.signals import catch_signals


def main() -> None:
    """Run a command."""
    catch_signals()
    # By default, threads that wait for each other spin for milliseconds, which keeps a core from other programs: beside one of
    # them a step takes 2.6 times as long, and 1.9 times if threads soon sleep. OpenMP reads this when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from crmatch.cli.app import main as run_command

    run_command()


if __name__ == "__main__":
    main()
