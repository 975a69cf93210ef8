#!/usr/bin/env python3
"""Accuracy on one setting: methods x splits, as a table with mean, deviation, n and seconds.

    python benchmarks/accuracy.py digits@4 --methods crmatch,fixmatch,supervised --splits 1-5 --name digits

Trains what is missing (finished runs are reused), keeps every record under docs/results/records/, and writes the table to
docs/results/<name>.md. With --from-records nothing is trained: the table is made anew from the committed records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from crmatch.config import RunSpec, replace
from crmatch.data.settings import Setting, parse_setting
from crmatch.methods import METHODS, Preset
from crmatch.recipes import recipe
from crmatch.results import RunRecord, run_directory

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
AVERAGES = (
    "averages of predictions and labels remember as long as the weights' EMA of `quick` does, not 1/1000 of their published "
    "memory: one batch of 16 labels says nothing about the frequencies of ten classes."
)
NOTES = {
    "remixmatch": ("[a]", f"at most two strong views (eight make a step four times as long); {AVERAGES}"),
    "mixmatch": (
        "[c]",
        "the weight of unlabeled images rises over 40 % of the run, as in USB. In proportion to the published ramp it would be "
        "at 100 after 16 steps, when guesses are still random; the network then memorizes the labels and answers at "
        "random (76 % error).",
    ),
    "featmatch": ("[d]", "two strong views instead of eight, which make a step five times as long as any other method's."),
    "label_propagation": ("[e]", "keeps its learning rate of two stages, the second of which starts anew."),
    **dict.fromkeys(("freematch", "softmatch", "adamatch"), ("[b]", AVERAGES)),
    **dict.fromkeys(("crmatch+freematch", "crmatch+softmatch", "crmatch+adamatch"), ("[b]", AVERAGES)),
}
"""Exceptions of `quick` from the rule that lengths scale with the run: mark and reason, by method."""
FINDINGS = {
    ("svhn_small@25", "fixmatch+ctaugment"): (
        "FixMatch with CTAugment does not beat supervised-only here: three times as many of its pseudo-labels are wrong as "
        "with RandAugment. The magnitudes that pass CTAugment's test on 250 labels are mild (its rates are in the record), so "
        "the network becomes sure of what it guesses before it guesses right. The error still falls when the run ends."
    ),
}
"""What was found where a method does not do what is expected of it, by setting and method."""


def record_path(record: RunRecord, method: str) -> Path:
    spec = record.spec
    return RESULTS / "records" / spec.setting / f"{method}-{spec.recipe}-split{spec.split}-seed{spec.seed}.json"


def spec_of(setting: Setting, method: str) -> RunSpec:
    """The quick spec of `NAME`, of `NAME+ctaugment`, or of `NAME+PRESET`: with a preset's choices, e.g. crmatch+flexmatch."""
    name, _, change = method.partition("+")
    spec = recipe(setting, name, "quick")
    if change in ("randaugment", "ctaugment"):
        return replace(spec, **{"augmentation.policy": change})
    if not change:
        return spec
    preset = METHODS[change]
    assert isinstance(preset, Preset), f"{change} is not a preset"
    return replace(spec, **{f"method.{key}": value for key, value in preset.changes.items()})


def train(setting: str, methods: list[str], splits: list[int], out: Path, data_dir: Path | None) -> None:
    from crmatch.experiment import run

    parsed = parse_setting(setting, data_dir)
    for split in splits:
        for method in methods:
            spec = replace(spec_of(parsed, method), split=split)
            record = run(spec, out, data_dir=data_dir)
            path = record_path(record, method)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record.model_dump(mode="json")) + "\n")
            print(
                f"{method} split {split}: {record.error} % in {record.seconds:.0f} s ({run_directory(out, spec, parsed).path})"
            )


def read(setting: str, methods: list[str], splits: list[int]) -> dict[str, list[RunRecord]]:
    records: dict[str, list[RunRecord]] = {}
    for method in methods:
        files = [RESULTS / "records" / setting / f"{method}-quick-split{split}-seed0.json" for split in splits]
        records[method] = [RunRecord.model_validate_json(file.read_text()) for file in files if file.exists()]
    return {method: runs for method, runs in records.items() if runs}


def table(records: dict[str, list[RunRecord]]) -> str:
    costs = json.loads((RESULTS / "method-cost.json").read_text())["costs"]
    lines = [
        "| method | test error % (mean ± std) | other weights | n splits | by split | pseudo-labels used, wrong % | mean s "
        "| passes: images | time | memory | numerics |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method, runs in records.items():
        chosen = [run.error for run in runs if run.error is not None]
        other = [errors.last for run in runs if (errors := run.raw if run.evaluated == "ema" else run.ema)]
        deviation = f" ± {statistics.stdev(chosen):.2f}" if len(chosen) > 1 else ""
        cost = costs.get(method)
        passes = f"{len(cost['passes'])}: {'+'.join(map(str, cost['passes']))}" if cost else ""
        ratios = [f"{cost[key]:.2f}" if cost else "" for key in ("time_ratio", "memory_ratio")]
        lines.append(
            f"| `{method}`{NOTES.get(method, ('', ''))[0]} | {statistics.mean(chosen):.2f}{deviation} | "
            f"{statistics.mean(other):.2f} | {len(chosen)} | {', '.join(f'{error:.2f}' for error in chosen)} | "
            f"{used_pseudo_labels(runs)} | {statistics.mean(run.seconds for run in runs):.0f} | {passes} | "
            f"{' | '.join(ratios)} | {', '.join(sorted({str(run.numerics) for run in runs}))} |"
        )
    return "\n".join(lines)


def used_pseudo_labels(runs: list[RunRecord]) -> str:
    """Share of unlabeled images whose pseudo-labels count, and the share of wrong ones among them; of the last steps."""
    if any("mask_rate" not in run.final for run in runs):
        return ""
    return ", ".join(f"{statistics.mean(run.final[key] for run in runs):.0f}" for key in ("mask_rate", "contributing_error"))


def page(setting: str, records: dict[str, list[RunRecord]], command: str) -> str:
    one = next(runs[0] for runs in records.values() if runs)
    versions = ", ".join(f"{name} {version}" for name, version in one.machine["versions"].items())
    threads = " or ".join(sorted({str(run.machine["threads"]) for runs in records.values() for run in runs}))
    marked = dict.fromkeys(note for method, note in NOTES.items() if method in records)
    found = [text for (where, method), text in FINDINGS.items() if where == setting and method in records]
    notes = "\n\n".join([*(f"{mark} {text}" for mark, text in marked), *found])
    return f"""## {setting}, recipe quick

{one.labeled_images} labeled, {one.unlabeled_images:,} unlabeled, {one.test_images:,} test images; {one.steps:,} steps at
{one.spec.data.image_size}x{one.spec.data.image_size}; error of the final model, seed 0, deviation over splits with n - 1.
The model that counts is the moving average of the weights, and the raw weights are "other"; for methods without an average it
is the other way round. Pseudo-labels are those of the last steps: the share of images that count, and the wrong share of these.
Passes, time and memory of a step are those of digits@4, time and memory relative to supervised-only on
as many images (`docs/results/method-cost.json`).
Every method has the common values of `quick` (spec 6.1), lengths in proportion to the run.

{table(records)}

{notes}

Made by `{command}` on {threads} threads ({versions}); the records are in `docs/results/records/{setting}/`.
Seconds are of a shared, noisy machine, most runs two at a time.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--methods", default="crmatch,fixmatch,supervised", help="names; fixmatch+ctaugment changes the policy")
    parser.add_argument("--splits", default="1-5")
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--from-records", action="store_true")
    options = parser.parse_args()
    first, _, last = options.splits.partition("-")
    splits = list(range(int(first), int(last or first) + 1))
    methods = options.methods.split(",")
    sections = []
    for setting in options.settings:
        if not options.from_records:
            train(setting, methods, splits, options.out, options.data_dir)
        records = read(setting, methods, splits)
        if not records:
            raise SystemExit(f"there is no record of {setting} under {RESULTS / 'records'}.\nRun it without --from-records.")
        arguments = f"--methods {','.join(records)} --splits {options.splits} --name {options.name}"
        sections.append(page(setting, records, f"python benchmarks/accuracy.py {setting} {arguments}"))
    text = f"# Results: {options.name}\n\n" + "\n".join(sections)
    (RESULTS / f"{options.name}.md").write_text(text)
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
