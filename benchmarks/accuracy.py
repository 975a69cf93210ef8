#!/usr/bin/env python3
"""Test errors of all methods over the fixed splits: tables with mean, deviation, n and seconds.

    python benchmarks/accuracy.py digits                                  # every method on digits@4: hours
    python benchmarks/accuracy.py small --data-dir DIR                    # real color images, DIR/svhn_small.npz and others
    python benchmarks/accuracy.py digits --methods vat --splits 2         # only these runs
    python benchmarks/accuracy.py digits small --from-records             # rewrite the pages from the committed records

Missing runs are trained, finished runs are reused. Every record is saved in docs/results/records/, and docs/results/<page>.md
is written from all records of the page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

from crmatch.data.settings import Setting, parse_setting
from crmatch.paper.grid import parse_splits, variant
from crmatch.runs.directory import run_directory
from crmatch.runs.record import RunRecord
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, differences, replace

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
AVERAGES = (
    "moving averages of predictions and labels decay as slowly as the EMA of the weights. Scaled with the run they would cover "
    "a single batch, and 16 labels do not show the frequencies of ten classes."
)
NOTES = {
    "remixmatch": ("[a]", f"at most two strong views, because eight make a step four times as long; {AVERAGES}"),
    "mixmatch": (
        "[c]",
        "with numerics below 4, the weight of the unlabeled images rises over 40 % of the run, as in USB, to its full value. "
        "Scaled with the run, the published ramp would end after 16 of 1,000 steps, when guesses are still random; on digits@4 "
        "the network then only memorizes the labels (76 % error).",
    ),
    "featmatch": (
        "[d]",
        "two strong views instead of eight, because eight make a step five times as long as that of any other method.",
    ),
    "label_propagation": (
        "[e]",
        "keeps its learning rate schedule of two stages; the second stage starts again at the full rate.",
    ),
    **dict.fromkeys(("freematch", "softmatch", "adamatch"), ("[b]", AVERAGES)),
    **dict.fromkeys(("crmatch+freematch", "crmatch+softmatch", "crmatch+adamatch"), ("[b]", AVERAGES)),
}
"""Where `quick` departs from the rule that lengths scale with the run: footnote mark and reason, by method."""
LEGEND = """How to read the tables:

- The test error is that of the final model, with the standard deviation (n - 1) over splits. It is measured with the moving
  average of the weights, and "other weights" are the raw ones. For methods without a moving average it is the other way round.
- "Pseudo-labels used, wrong" are percentages in the last steps: unlabeled images whose pseudo-label is used, and wrong ones
  among these.
- Passes, time and memory are those of a step on digits@4. Time and memory are relative to supervised-only on the same number
  of images (`docs/results/method-cost.json`).
- Numerics is the version of the arithmetic (`NUMERICS` in `src/crmatch/spec/run_spec.py`).
- All methods share the values of the recipe `quick` (`crmatch show config SETTING --recipe quick`). Lengths in steps that the
  paper of a method gives are scaled to the length of the run. Letters in brackets mark exceptions.
- With numerics below 4, ramps were scaled like other lengths, all methods had 16 labeled and 112 unlabeled images per step, and
  the first stages of label propagation and PLCB had batches of 16 (docs/decisions.md says what changed).
"""
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
"""The methods of the paper's tables on five splits of digits@4, all others on three; color images on one split."""


def record_path(record: RunRecord, method: str) -> Path:
    spec = record.spec
    return RESULTS / "records" / spec.setting / f"{method}-{spec.recipe}-split{spec.split}-seed{spec.seed}.json"


def spec_of(setting: Setting, method: str) -> RunSpec:
    """The quick spec of a method, e.g. `fixmatch`; with a policy, `fixmatch+ctaugment`; with a preset, `crmatch+flexmatch`."""
    name, changes, _ = variant(method)
    return replace(recipe(setting, name, "quick"), **changes)


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
    """The committed records by method. The records of a method must differ in their splits only."""
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
    """Percentage of unlabeled images whose pseudo-labels are used, and of wrong ones among these, in the last steps."""
    if any("mask_rate" not in run.final for run in runs):
        return ""
    return ", ".join(f"{statistics.mean(run.final[key] for run in runs):.0f}" for key in ("mask_rate", "contributing_error"))


def about_ctaugment(records: dict[str, list[RunRecord]]) -> list[str]:
    """An explanation, if FixMatch with CTAugment is no better than supervised-only."""
    runs = [records.get(method, []) for method in ("fixmatch+ctaugment", "fixmatch", "supervised")]
    if not all(runs):
        return []
    learned, random, supervised = (statistics.mean(run.error or 0.0 for run in of) for of in runs)
    wrong, wrong_by_random = (statistics.mean(run.final["contributing_error"] for run in of) for of in runs[:2])
    if not (learned > supervised > random and wrong > 2 * wrong_by_random):
        return []
    return [
        f"FixMatch with CTAugment does not beat supervised-only here: at the end {wrong:.0f} % of the pseudo-labels it uses "
        f"are wrong, against {wrong_by_random:.0f} % with RandAugment. With few labels CTAugment allows only mild magnitudes "
        "(its rates are in the record), so the network becomes confident before its predictions are right."
    ]


def about_mixing(records: dict[str, list[RunRecord]]) -> list[str]:
    """An explanation, if MixMatch or ReMixMatch is no better than supervised-only."""
    found = []
    for name, of in (("MixMatch", "mixmatch"), ("ReMixMatch", "remixmatch")):
        if not {of, "supervised"} <= records.keys():
            continue
        run, supervised = records[of][0], records["supervised"][0]
        if (run.error or 0.0) < (supervised.error or 0.0):
            continue
        reason = ""
        if run.numerics < 4:  # ramps were scaled in proportion
            rise = run.spec.method.scaled(run.spec.method.model_dump()["ramp_steps"], run.steps)
            reason = "Its curves suggest that `quick` did not suit it: the unlabeled terms "
            reason += f"reached full weight after {rise:,} steps, when few guesses are right. "
        loss = f"{run.final['loss/supervised']:.2f} (uniform guessing: {math.log(len(run.class_names)):.2f})"
        found.append(
            f"{name} does not beat supervised-only here. {about_one_class(run)}{reason}At the end, the loss on labeled (mixed) "
            f"images is {loss}"
            + (f" and the consistency loss {run.final['loss/consistency']:.3f} (mean square)." if of == "mixmatch" else ".")
        )
    return found


def about_one_class(run: RunRecord) -> str:
    """A sentence for a model that predicts nearly always the same class, else nothing."""
    predicted = [sum(column) for column in zip(*run.confusion, strict=True)]
    share = max(predicted, default=0) / max(sum(predicted), 1)
    if share < 0.9:
        return ""
    name = run.class_names[predicted.index(max(predicted))]
    return f'It predicts the class "{name}" for {100 * share:.0f} % of the test images. '


def about_wrong_pseudo_labels(records: dict[str, list[RunRecord]]) -> list[str]:
    """An explanation, if the pseudo-labels of all methods are mostly wrong."""
    wrong = [run.final["contributing_error"] for runs in records.values() for run in runs if "contributing_error" in run.final]
    supervised = records.get("supervised", [])
    if not (wrong and supervised and min(wrong) > 75):
        return []
    one = supervised[0]
    passes = one.steps * one.spec.plan.labeled_batch_size / one.labeled_images
    return [
        f"The run is too short for so many classes to tell which method is better: after {passes:.0f} passes over the labels, "
        f"supervised-only has a training loss of {one.final['loss/supervised']:.1f}, and at the end at least "
        f"{min(wrong):.0f} % of the pseudo-labels of every method are wrong."
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

{one.labeled_images} labeled, {one.unlabeled_images:,} unlabeled and {one.test_images:,} test images; {one.steps:,} steps at
{one.spec.data.image_size}x{one.spec.data.image_size} pixels; seed 0.

{table(records)}

{notes}

Made by `{command}` on {threads} ({versions}). The records are in `docs/results/records/{setting}/`.
Seconds were measured on a shared machine, where most runs trained two at a time.
"""


def page(name: str) -> str:
    """The text of a page, made from the committed records."""
    found = {setting: read(setting, methods) for setting, methods in PAGES[name].items()}
    command = f"python benchmarks/accuracy.py {name}"
    sections = [section(setting, records, command) for setting, records in found.items() if records]
    return f"# Results: {name}\n\n{LEGEND}\n" + "\n".join(sections)


def chosen(plan: Plan, methods: str | None, splits: str | None, settings: str | None) -> Plan:
    """The part of a plan that the options select."""
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
    parser.add_argument("--settings", help="train only these settings of the page, separated by commas")
    parser.add_argument("--methods", help="train only these methods of the page, separated by commas")
    parser.add_argument("--splits", help="train only these splits of the page, e.g. 1-3 or 2")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--data-dir", type=Path, help="where packed sets are kept")
    parser.add_argument("--from-records", action="store_true", help="train nothing; only write the pages")
    options = parser.parse_args()
    for name in options.pages:
        if not options.from_records:
            train(chosen(PAGES[name], options.methods, options.splits, options.settings), options.out, options.data_dir)
        (RESULTS / f"{name}.md").write_text(page(name))


if __name__ == "__main__":
    main()
