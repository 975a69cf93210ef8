#!/usr/bin/env python3
"""Accuracy of methods over splits, as pages of tables with mean, deviation, n and seconds.

    python benchmarks/accuracy.py digits                                  # every method on digits@4: hours
    python benchmarks/accuracy.py small --data-dir DIR                    # real color images, DIR/svhn_small.npz and others
    python benchmarks/accuracy.py digits --methods vat --splits 2         # only these runs of it
    python benchmarks/accuracy.py digits small --from-records             # the pages anew from the committed records

Trains what is missing (finished runs are reused), keeps every record under docs/results/records/, and writes
docs/results/<page>.md from all records of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

from crmatch.data.settings import Setting, parse_setting
from crmatch.methods import METHODS, Preset
from crmatch.paper.grid import parse_splits
from crmatch.runs.directory import run_directory
from crmatch.runs.record import RunRecord
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, differences, replace

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
ROWS = ("crmatch", "fixmatch", "fixmatch+ctaugment", "uda", "remixmatch", "mixmatch", "mean_teacher")
MEMORIES = ("featmatch", "label_propagation", "plcb")
RULES = ("flexmatch", "freematch", "softmatch", "adamatch")
OTHERS = ("pseudo_label", "pi_model", "vat", "ict", *RULES, *(f"crmatch+{rule}" for rule in RULES))
Plan = dict[str, dict[str, tuple[int, ...]]]
"""Setting -> method -> splits."""
PAGES: dict[str, Plan] = {
    "digits": {
        "digits@4": {
            **dict.fromkeys((*ROWS, *MEMORIES), (1, 2, 3, 4, 5)),
            **dict.fromkeys(OTHERS, (1, 2, 3)),
            "supervised": (1, 2, 3, 4, 5),
        }
    },
    "small": {
        **dict.fromkeys(("svhn_small@25", "cifar10_small@25"), dict.fromkeys((*ROWS, "supervised"), (1,))),
        "mini_imagenet_small@10": dict.fromkeys((*MEMORIES, "supervised"), (1,)),
    },
}
"""The paper's rows on five splits of digits@4, all else on three; real images on one."""


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


def train(plan: Plan, out: Path, data_dir: Path | None) -> None:
    from crmatch.runs.run import run
    from crmatch.runs.workspace import Workspace

    for setting, methods in plan.items():
        parsed = parse_setting(setting, data_dir)
        for method, split in ((method, split) for method, splits in methods.items() for split in splits):
            record = run(replace(spec_of(parsed, method), split=split), Workspace.at(out, data_dir))
            path = record_path(record, method)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record.model_dump(mode="json")) + "\n")
            directory = run_directory(out, record.spec, parsed).path
            print(f"{method} split {split}: {record.error} % in {record.seconds:.0f} s ({directory})")


def read(setting: str, methods: dict[str, tuple[int, ...]]) -> dict[str, list[RunRecord]]:
    """The committed records by method; those of a method differ in their splits only."""
    records: dict[str, list[RunRecord]] = {}
    for method, splits in methods.items():
        files = [RESULTS / "records" / setting / f"{method}-quick-split{split}-seed0.json" for split in splits]
        runs = [RunRecord.model_validate_json(file.read_text()) for file in files if file.exists()]
        for run in runs:
            if changed := differences(runs[0].spec, run.spec).keys() - {"split"}:
                raise SystemExit(
                    f"{record_path(run, method)} differs from the other splits in {', '.join(changed)}.\nRemove it."
                )
        records |= {method: runs} if runs else {}
    return records


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


def about_ctaugment(records: dict[str, list[RunRecord]]) -> list[str]:
    """What is known where FixMatch with CTAugment is no better than supervised-only."""
    runs = [records.get(method, []) for method in ("fixmatch+ctaugment", "fixmatch", "supervised")]
    if not all(runs):
        return []
    learned, random, supervised = (statistics.mean(run.error or 0.0 for run in of) for of in runs)
    wrong, wrong_by_random = (statistics.mean(run.final["contributing_error"] for run in of) for of in runs[:2])
    if not (learned > supervised > random and wrong > 2 * wrong_by_random):
        return []
    return [
        f"FixMatch with CTAugment does not beat supervised-only here: {wrong:.0f} % of the pseudo-labels that count are wrong "
        f"at the end, {wrong_by_random:.0f} % with RandAugment. Magnitudes that pass CTAugment's test on few labels are mild "
        "(its rates are in the record), so the network becomes sure of what it guesses before it guesses right."
    ]


def about_mixing(records: dict[str, list[RunRecord]]) -> list[str]:
    """What is known where MixMatch or ReMixMatch is no better than supervised-only."""
    found = []
    for name, of in (("MixMatch", "mixmatch"), ("ReMixMatch", "remixmatch")):
        if not {of, "supervised"} <= records.keys():
            continue
        run, supervised = records[of][0], records["supervised"][0]
        if (run.error or 0.0) < (supervised.error or 0.0):
            continue
        rise = run.spec.method.scaled(run.spec.method.model_dump()["ramp_steps"], run.steps)
        loss = f"{run.final['loss/supervised']:.2f} (guessing gives {math.log(len(run.class_names)):.2f})"
        found.append(
            f"{name} does not beat supervised-only here; its curves say that `quick` sets it wrongly. Its unlabeled terms have "
            f"full weight after {rise:,} steps, when few guesses are right, and agreeing is cheaper than knowing. At "
            f"the end its loss on labeled (mixed) images is {loss}"
            + (f", its predictions differ by {run.final['loss/consistency']:.3f} (mean square)." if of == "mixmatch" else ".")
        )
    return found


def about_wrong_pseudo_labels(records: dict[str, list[RunRecord]]) -> list[str]:
    """What is known where no method ever guesses well."""
    wrong = [run.final["contributing_error"] for runs in records.values() for run in runs if "contributing_error" in run.final]
    supervised = records.get("supervised", [])
    if not (wrong and supervised and min(wrong) > 75):
        return []
    one = supervised[0]
    passes = one.steps * one.spec.plan.labeled_batch_size / one.labeled_images
    return [
        f"Too short a run for so many classes to say which method is better: {passes:.0f} passes over the labels leave "
        f"supervised-only with a training loss of {one.final['loss/supervised']:.1f}, and at least {min(wrong):.0f} % of any "
        "method's pseudo-labels are wrong to the end."
    ]


def section(setting: str, records: dict[str, list[RunRecord]], command: str) -> str:
    one = next(iter(records.values()))[0]
    versions = ", ".join(f"{name} {version}" for name, version in one.machine["versions"].items())
    threads = " or ".join(sorted({str(run.machine["threads"]) for runs in records.values() for run in runs}))
    threads += " thread" if threads == "1" else " threads"
    marked = dict.fromkeys(note for method, note in NOTES.items() if method in records)
    findings = [text for about in (about_ctaugment, about_mixing, about_wrong_pseudo_labels) for text in about(records)]
    notes = "\n\n".join([*(f"{mark} {text}" for mark, text in marked), *findings])
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

Made by `{command}` on {threads} ({versions}); the records are in `docs/results/records/{setting}/`.
Seconds are of a shared, noisy machine, most runs two at a time.
"""


def page(name: str) -> str:
    """The text of a page, from the records there are."""
    found = {setting: read(setting, methods) for setting, methods in PAGES[name].items()}
    command = f"python benchmarks/accuracy.py {name}"
    sections = [section(setting, records, command) for setting, records in found.items() if records]
    return f"# Results: {name}\n\n" + "\n".join(sections)


def chosen(plan: Plan, methods: str | None, splits: str | None, settings: str | None) -> Plan:
    """What of a plan is asked for."""
    wanted_splits = parse_splits(splits) if splits else None
    return {
        setting: {
            method: tuple(split for split in planned if wanted_splits is None or split in wanted_splits)
            for method, planned in of.items()
            if methods is None or method in methods.split(",")
        }
        for setting, of in plan.items()
        if settings is None or setting in settings.split(",")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", choices=PAGES)
    parser.add_argument("--settings", help="train only these of the page's")
    parser.add_argument("--methods", help="train only these of the page's")
    parser.add_argument("--splits", help="train only these of the page's")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--from-records", action="store_true", help="train nothing")
    options = parser.parse_args()
    for name in options.pages:
        if not options.from_records:
            train(chosen(PAGES[name], options.methods, options.splits, options.settings), options.out, options.data_dir)
        (RESULTS / f"{name}.md").write_text(page(name))


if __name__ == "__main__":
    main()
