"""Claims tested on records alone, and the page about them. Imports no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from crmatch.analysis.curves import class_spread
from crmatch.paper.claims import FEWER_LABELS, NOT_TESTED, TOPICS, Claim, Comparison, Plan
from crmatch.paper.formats import fold_splits
from crmatch.paper.intervals import Estimate, Verdict, combine, estimate, holm
from crmatch.paper.results import Find, Run, check_data, numerics_note, read_analysis, rounded

VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "undecided", "not tested")
COLUMNS = ("claim", "as claimed", "difference", "95 % t", "95 % bootstrap", "n", "verdict")
HOW_TO_READ = """\
- "A < B" claims that A has the lower error, or another measure if one is named. The difference is B minus A: positive if the
  claim is right. "A < B + 2.33" allows A to be 2.33 higher. Cosines are in hundredths, all others in percentage points.
- Differences are paired: both runs of a split have the same labels, seed and draws. n is the number of splits. Rounding is the
  same on one kind of processor only: on another one the same run can end a point or two higher or lower.
- The 95 % intervals are for the mean over splits: by Student's t, and by the bootstrap (percentiles of 10,000 resampled means,
  too narrow for few splits). They hold for other draws of labels from the same data set, with the same test images.
- A difference holds if both intervals are above zero, and does not hold if both are below zero. Otherwise it is undecided; in
  parentheses is the number of splits with which the t interval would exclude zero with a probability of about 80 %, if mean and
  standard deviation stayed the same.
- A claim with several differences holds if all of them do. It does not hold if one is below zero even when its p-value is
  multiplied by their number (Bonferroni).
- One test in twenty comes out significant by chance. Verdicts in bold stay significant when all claims about a setting are
  corrected together (Holm); the other ones should be read as hints.
- The runs are far shorter than the paper's and their networks smaller. A claim that does not hold here may hold at its scale.
"""


class Finding(NamedTuple):
    """A comparison with its differences, one per split, and what they say."""

    comparison: Comparison
    estimate: Estimate

    @property
    def label(self) -> str:
        """The claim as an inequality."""
        one, (measure, other) = self.comparison, (measure.partition(".")[2] for measure in self.comparison.measures)
        if measure != other:
            return f"{one.lower}: {measure} < {other}"
        if one.gains:
            return f"{one.higher} − {one.lower}: more labels < fewer labels"
        what = f"{measure.replace('_', ' ')}: " if measure else ""
        return f"{what}{one.lower} < {one.higher}" + (f" + {one.margin:g}" if one.margin else "")


class Tested(NamedTuple):
    """A claim with its findings and its verdict; `robust`: the verdict is still significant with Holm's correction."""

    claim: Claim
    findings: tuple[Finding, ...]
    verdict: Verdict
    robust: bool = False

    @property
    def text(self) -> str:
        """The verdict; if it is undecided, with the number of splits that would decide all differences."""
        if self.verdict != "undecided":
            return f"**{self.verdict}**" if self.robust else self.verdict
        undecided = [one.estimate for one in self.findings if one.estimate.verdict == "undecided"]
        return decided(max(undecided, key=lambda one: one.splits_needed or math.inf)) if undecided else "undecided"


class Results(NamedTuple):
    """All claims about a setting."""

    plan: Plan
    tested: tuple[Tested, ...]
    sources: tuple[str, ...]  # the runs behind them
    notes: tuple[str, ...]

    @property
    def summary(self) -> str:
        """How many claims have each verdict."""
        counts = Counter(one.verdict for one in self.tested)
        return ", ".join(f"{verdict}: {counts[verdict]}" for verdict in VERDICTS)

    @property
    def title(self) -> str:
        """Setting, recipe, steps and splits."""
        return self.plan.grid.title.partition(" (n = ")[0]


def evaluate_claims(plan: Plan, find: Find) -> Results:
    """Test the claims of a plan on finished runs."""
    found = {spec: run for spec in plan.grid.specs if (run := find(spec)) is not None}
    check_data(list(found.values()))

    def values(configuration: str, measure: str) -> list[float | None]:
        runs = [found.get(spec) for spec in plan.specs(configuration)]
        return [_value(run, measure) if run else None for run in runs]

    def differences(one: Comparison, labels: str) -> list[float | None]:
        lower, higher = (values(name + labels, key) for name, key in zip((one.lower, one.higher), one.measures, strict=True))
        return [None if a is None or b is None else b - a + one.margin for a, b in zip(lower, higher, strict=True)]

    def compare(one: Comparison) -> Finding:
        found = differences(one, "")
        if one.gains:
            fewer = differences(one, FEWER_LABELS)
            found = [None if a is None or b is None else a - b for a, b in zip(fewer, found, strict=True)]
        return Finding(one, estimate([difference for difference in found if difference is not None]))

    findings = [tuple(map(compare, claim.comparisons)) for claim in plan.claims]
    verdicts = [combine([finding.estimate for finding in of]) for of in findings]
    counted = [p for verdict, p in verdicts if verdict != "not tested"]
    robust = iter(holm(counted))
    tested = [
        Tested(claim, of, verdict, verdict != "not tested" and next(robust))
        for claim, of, (verdict, _) in zip(plan.claims, findings, verdicts, strict=True)
    ]
    runs = list(found.values())
    return Results(plan, tuple(tested), tuple(run.source for run in runs), tuple(numerics_note(runs)))


def _value(run: Run, measure: str) -> float | None:
    """A measure of a run; None if it was not measured. Cosines are in hundredths, all others in percent."""
    kind, _, key = measure.partition(".")
    if kind == "error":
        return run.record.error
    if kind == "spread":
        return class_spread(run.record.per_class_error)
    if kind == "final":
        return run.record.final.get(key)
    summary = read_analysis(run, kind, key)
    return None if summary is None else summary.mean * (100 if kind == "distances" else 1)


def claims_of(results: Sequence[Results]) -> list[Claim]:
    """The claims about any of the settings, by topic."""
    claims = dict.fromkeys(one.claim for of in results for one in of.tested)
    return sorted(claims, key=lambda claim: TOPICS.index(claim.topic))


def to_page(results: Sequence[Results], picture: str, command: str) -> str:
    """The page in Markdown: the picture, all claims with their verdicts, then the numbers of each setting."""
    settings = [one.plan.setting.name for one in results]
    lines = ["# The paper's claims, tested", "", f"Made from records alone by `{command}`.", ""]
    lines += [*(f"- {one.title}: {one.summary}." for one in results), ""]
    lines += [f"![Differences with their 95 % intervals]({picture})", ""] * any(one.sources for one in results)
    lines += ["## How to read it", "", HOW_TO_READ]
    lines += [
        "## All claims",
        "",
        f"| topic | claim | place | {' | '.join(settings)} |",
        "|---|---|---|" + "---|" * len(settings),
    ]
    for claim in claims_of(results):
        by_setting = [{one.claim: one for one in of.tested}.get(claim) for of in results]
        cells = [one.text if one else "–" for one in by_setting]
        lines.append(f"| {claim.topic} | {claim.text} | {claim.place} | {' | '.join(cells)} |")
    for one in results:
        lines += ["", *_section(one)]
    lines += ["", "## Not tested", ""]
    lines += [f"- {place}: {text}; {reason}." for place, text, reason in NOT_TESTED]
    for one in results:
        lines += [f"- {claim.place}, {one.plan.setting.name}: {claim.text}; {why}." for claim, why in one.plan.impossible]
    return "\n".join(lines) + "\n"


def _section(results: Results) -> list[str]:
    lines = [f"## {results.plan.setting.name}", "", f"{results.title}. {' '.join(results.notes)}".rstrip(), ""]
    if not results.sources:
        return [*lines, "There are no runs yet."]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(row)} |" for row in rows_of(results)]
    lines += ["", "<details><summary>Runs</summary>", "", *(f"- `{source}`" for source in fold_splits(results.sources))]
    return [*lines, "", "</details>"]


def rows_of(results: Results) -> Iterator[tuple[str, ...]]:
    """A row for each difference; a claim with several has its own row above them. Claims without runs are left out."""
    for one in results.tested:
        several = len(one.findings) > 1
        if several and one.verdict != "not tested":
            yield (one.claim.text, "", "", "", "", "", one.text)
        for finding in one.findings if one.verdict != "not tested" else ():
            difference, n = finding.estimate, finding.estimate.n
            numbers = [_signed(difference.mean) if n else "–", _interval(difference.t), _interval(difference.bootstrap), str(n)]
            yield ("" if several else one.claim.text, finding.label, *numbers, decided(difference) if several else one.text)


def decided(one: Estimate) -> str:
    """The verdict on one difference; if it is undecided, with the number of splits that would decide it."""
    if one.verdict != "undecided":
        return one.verdict
    if one.t is None:
        return "undecided (one split)" if one.n == 1 else "undecided (equal differences)"
    return f"undecided ({one.splits_needed or 'more than 1,000'} splits)"


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "−") + rounded(abs(value))


def _interval(interval: tuple[float, float] | None) -> str:
    return "–" if interval is None else " to ".join(map(_signed, interval))
