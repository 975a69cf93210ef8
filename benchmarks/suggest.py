#!/usr/bin/env python3
"""Do suggested labels help more than random ones? Measured on digits@4, five splits, trained from scratch.

    python benchmarks/suggest.py --out runs/suggest

For each split, CR-Match is trained on its 40 labels, then with the true labels of 20 suggested images added, and then with
those of 20 random images (three draws). Finished runs are reused, so an interrupted benchmark can be resumed. Writes
docs/results/suggest.md.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from crmatch.data.settings import parse_setting
from crmatch.predict.label_suggestions import read_run, suggest
from crmatch.randomness import generator
from crmatch.runs.directory import run_directory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe, setting_of
from crmatch.spec.run_spec import replace

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
RECORDS = RESULTS / "records" / "suggest"
DRAWS = 3


def trained(setting: str, split: int, steps: int | None, out: Path, labels: Path | None = None) -> tuple[float, Path]:
    """Test error and run directory of CR-Match on a split, optionally with the labels of a file added."""
    changes = {} if steps is None else {"plan.steps": steps}
    spec = replace(recipe(parse_setting(setting, None, labels), "crmatch", "quick"), split=split, **changes)
    error = run(spec, out).error
    assert error is not None
    print(f"split {split}, {labels.name if labels else 'no more labels'}: {error:.2f} %", flush=True)
    directory = run_directory(out, spec, setting_of(spec))
    if steps is None and labels:  # records without additional labels are among those of docs/results/digits.md
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / f"split{split}-{labels.stem}.json").write_bytes(directory.record.read_bytes())
    return error, directory.path


def write_labels(path: Path, rows: list[int], labels: torch.Tensor, names: tuple[str, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("path,label\n" + "".join(f"{row},{names[int(labels[row])]}\n" for row in rows))
    return path


def one_split(setting: str, split: int, count: int, steps: int | None, out: Path) -> dict[str, float]:
    """Errors without additional labels, with suggested ones, and with random ones (mean over draws)."""
    before, directory = trained(setting, split, steps, out)
    reviewed = read_run(directory, Workspace.at(out))
    train, rows = reviewed.run.data.train, reviewed.scores.rows
    folder = out / "labels" / f"split{split}"
    chosen = [item.row for item in suggest(reviewed, count)]
    file = write_labels(folder / "suggested.csv", chosen, train.labels, train.class_names)
    errors = {"before": before, "suggested": trained(setting, split, steps, out, file)[0]}
    random = []
    for draw in range(DRAWS):
        order = torch.randperm(len(rows), generator=generator(split, "benchmark/suggest", draw))
        file = write_labels(folder / f"random{draw + 1}.csv", rows[order[:count]].tolist(), train.labels, train.class_names)
        random.append(trained(setting, split, steps, out, file)[0])
    return {**errors, "random": statistics.mean(random)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", default="digits@4", help="data set and labels per class")
    parser.add_argument("--splits", type=int, default=5, help="number of splits")
    parser.add_argument("--count", type=int, default=20, help="number of additional labels")
    parser.add_argument("--steps", type=int, help="length of the runs, for a short trial that writes nothing to docs/")
    parser.add_argument("--out", type=Path, default=Path("runs/suggest"), help="where runs are kept")
    options = parser.parse_args()
    rows = [
        one_split(options.setting, split, options.count, options.steps, options.out) for split in range(1, options.splits + 1)
    ]
    means = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    lines = [
        "| split | before | suggested | random |",
        "|---|---|---|---|",
        *(f"| {number} | " + " | ".join(f"{value:.2f}" for value in row.values()) + " |" for number, row in enumerate(rows, 1)),
        "| mean | " + " | ".join(f"**{value:.2f}**" for value in means.values()) + " |",
    ]
    print("\n".join(lines))
    if options.steps is None:
        about = (
            f"Test error in percent of CR-Match on {options.setting} (recipe `quick`, trained from scratch) before and after\n"
            f"adding {options.count} labels: of images from `crmatch suggest`, or of random images (mean of {DRAWS} draws).\n"
            "Made by `python benchmarks/suggest.py`. The records are in `docs/results/records/suggest/`."
        )
        text = "\n".join(["# Suggested labels against random ones", "", about, "", *lines, ""])
        (RESULTS / "suggest.md").write_text(text)


if __name__ == "__main__":
    main()
