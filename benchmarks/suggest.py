#!/usr/bin/env python3
"""Do suggested labels help more than random ones? Measured on digits@4 (from scratch) and eurosat_small@4 (frozen features).

    python benchmarks/suggest.py --out runs/suggest --data-dir DIR      # DIR has eurosat_small.npz

For each of five splits, CR-Match is trained on its 40 labels, then with the true labels of 20 suggested images added, and then
with those of 20 random images (three draws). Finished runs are reused, so an interrupted benchmark can be resumed. Writes
docs/results/suggest.md.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from crmatch.data.settings import parse_setting
from crmatch.paper.intervals import estimate
from crmatch.predict.label_suggestions import read_run, suggest
from crmatch.randomness import generator
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
RECORDS = RESULTS / "records" / "suggest"
RECIPES = {"digits@4": "quick", "eurosat_small@4": "head"}
SPLITS, COUNT, DRAWS = 5, 20, 3
Errors = dict[str, float]
VERDICTS = {"holds": "suggested labels are better", "does not hold": "random labels are better"}
VERDICTS |= dict.fromkeys(("undecided", "not tested"), "undecided")


def trained(setting: str, split: int, workspace: Workspace, labels: Path | None = None) -> tuple[float, Path]:
    """Test error and run directory of CR-Match on a split, optionally with the labels of a file added."""
    parsed = parse_setting(setting, workspace.data_dir, labels)
    spec = replace(recipe(parsed, "crmatch", RECIPES[setting]), split=split)
    error = run(spec, workspace).error
    assert error is not None
    print(f"{setting}, split {split}, {labels.name if labels else 'no more labels'}: {error:.2f} %", flush=True)
    directory = workspace.run_directory(spec)
    record = RECORDS / setting / f"split{split}-{labels.stem if labels else 'before'}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(directory.record.read_text().replace(f"{workspace.out.resolve()}/", ""))  # no paths of this machine
    return error, directory.path


def write_labels(path: Path, rows: list[int], labels: torch.Tensor, names: tuple[str, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("path,label\n" + "".join(f"{row},{names[int(labels[row])]}\n" for row in rows))
    return path


def one_split(setting: str, split: int, workspace: Workspace) -> Errors:
    """Errors without additional labels, with suggested ones, and with random ones (mean over draws)."""
    before, directory = trained(setting, split, workspace)
    reviewed = read_run(directory, workspace)
    train, rows = reviewed.run.data.train, reviewed.scores.rows
    folder = workspace.out / "labels" / setting / f"split{split}"
    chosen = [item.row for item in suggest(reviewed, COUNT)]
    file = write_labels(folder / "suggested.csv", chosen, train.labels, train.class_names)
    errors = {"before": before, "suggested": trained(setting, split, workspace, file)[0]}
    random = []
    for draw in range(DRAWS):
        order = torch.randperm(len(rows), generator=generator(split, "benchmark/suggest", draw))
        file = write_labels(folder / f"random{draw + 1}.csv", rows[order[:COUNT]].tolist(), train.labels, train.class_names)
        random.append(trained(setting, split, workspace, file)[0])
    return {**errors, "random": statistics.mean(random)}


def section(setting: str, rows: list[Errors]) -> str:
    """A table of the splits, and the paired difference between random and suggested labels."""
    means = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    gain = estimate([row["random"] - row["suggested"] for row in rows])
    interval = f"{gain.t[0]:.2f} to {gain.t[1]:.2f}" if gain.t else "none"
    lines = [
        f"## {setting}, recipe `{RECIPES[setting]}`",
        "",
        "| split | before | suggested | random |",
        "|---|---|---|---|",
        *(f"| {number} | " + " | ".join(f"{value:.2f}" for value in row.values()) + " |" for number, row in enumerate(rows, 1)),
        "| mean | " + " | ".join(f"**{value:.2f}**" for value in means.values()) + " |",
        "",
        f"Random minus suggested: {gain.mean:.2f} points (95 % interval {interval}, n = {gain.n}): {VERDICTS[gain.verdict]}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/suggest"), help="where runs are kept")
    parser.add_argument("--data-dir", type=Path, help="where eurosat_small.npz is")
    options = parser.parse_args()
    workspace = Workspace.at(options.out, options.data_dir)
    sections = [
        section(setting, [one_split(setting, split, workspace) for split in range(1, SPLITS + 1)]) for setting in RECIPES
    ]
    about = (
        f"Test error in percent of CR-Match before and after adding {COUNT} labels to the 40 of a split: of images from\n"
        f"`crmatch suggest`, or of random images (mean of {DRAWS} draws). Intervals are Student's t over splits. Made by\n"
        "`python benchmarks/suggest.py`. The records are in `docs/results/records/suggest/`."
    )
    text = "\n\n".join(["# Suggested labels against random ones", about, *sections]) + "\n"
    (RESULTS / "suggest.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
