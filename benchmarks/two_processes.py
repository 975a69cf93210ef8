#!/usr/bin/env python3
"""Is the test error of runs on two processes within the range of runs on one process? Measured with CR-Match on digits@4.

    python benchmarks/two_processes.py

Trains splits 1 to 3 with `torchrun --nproc-per-node 2` (finished runs are reused) and reads the one-process runs of all five
splits from docs/results/records/. Writes docs/results/two-processes.md, and the records to
docs/results/two-processes.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from crmatch.analysis.curves import summarize
from crmatch.runs.record import RunRecord

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
SETTING, SPLITS, PROCESSES = "digits@4", (1, 2, 3), 2


def shared_run(split: int, out: Path) -> RunRecord:
    """The record of a run on two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES), "-m", "crmatch"]
    command = [*launcher, "train", SETTING, "--recipe", "quick", "--split", str(split), "--out", str(out), "--json"]
    answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    return RunRecord.model_validate_json((Path(answer["run"]) / "record.json").read_text())


def page(alone: list[RunRecord], shared: list[RunRecord]) -> str:
    by_split = {run.spec.split: run for run in alone}
    rows = [f"| {run.spec.split} | {by_split[run.spec.split].error:.2f} | {run.error:.2f} |" for run in shared]
    one, two = (summarize([run.error or 0.0 for run in runs]) for runs in (alone, shared))
    lowest, highest = min(run.error or 0.0 for run in alone), max(run.error or 0.0 for run in alone)
    within = sum(lowest <= (run.error or 0.0) <= highest for run in shared)
    newline = "\n"
    return f"""# One run on two processes

CR-Match on {SETTING}, recipe quick, made by `python benchmarks/two_processes.py`. Both use the same random draws but add
numbers in a different order, so the runs diverge after a few hundred steps.

| split | test error %, one process | two processes |
|---|---|---|
{newline.join(rows)}
| mean ± std | {one.mean:.2f} ± {one.std:.2f} (n = {one.n}) | {two.mean:.2f} ± {two.std:.2f} (n = {two.n}) |

{within} of {len(shared)} runs on two processes have an error between the lowest and the highest error of runs on one
process ({lowest:.2f} to {highest:.2f} %). Numerics: {numerics(alone)} on one process, {numerics(shared)} on two.
"""


def numerics(runs: list[RunRecord]) -> str:
    return ", ".join(sorted({str(run.numerics) for run in runs}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs-of-two"),
        help="where runs are kept; not where ordinary runs are, because they have the same specs",
    )
    options = parser.parse_args()
    files = sorted((RESULTS / "records" / SETTING).glob("crmatch-quick-split?-seed0.json"))
    alone = [RunRecord.model_validate_json(file.read_text()) for file in files]
    shared = [shared_run(split, options.out) for split in SPLITS]
    values: list[dict[str, Any]] = [run.model_dump(mode="json") for run in shared]
    (RESULTS / "two-processes.json").write_text(json.dumps(values, indent=1) + "\n")
    (RESULTS / "two-processes.md").write_text(page(alone, shared))


if __name__ == "__main__":
    main()
