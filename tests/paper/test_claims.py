"""Claims: their directions are the paper's, their runs are planned once, and synthetic records get the right verdicts."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_records import TEMPLATE

from crmatch.analysis.probe import STRONG_AGAINST_WEAK, TRANSFORMATIONS
from crmatch.analysis.similarities import PAIRS
from crmatch.data.settings import parse_setting
from crmatch.errors import RequestError
from crmatch.paper.claims import CLAIMS, CONFIGURATIONS, FEWER_LABELS, TOPICS, Plan, make_plan, order_claims
from crmatch.paper.grid import Overrides, make_grid
from crmatch.paper.results import Run, analysis_file
from crmatch.paper.tables import PAPER_TABLES
from crmatch.paper.verdicts import Results, evaluate_claims, to_page
from crmatch.runs.cost import estimate
from crmatch.runs.record import Errors, RunRecord
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec, replace

FIVE = (1, 2, 3, 4, 5)


def plan_of(*topics: str, setting: str = "digits@4", splits: tuple[int, ...] = FIVE, **overrides: object) -> Plan:
    return make_plan(topics, setting, Overrides(splits=splits, **overrides), Workspace())  # type: ignore[arg-type]


def record(spec: RunSpec, error: float, **changes: object) -> RunRecord:
    errors = Errors(last=error, median_last_20=error + 50, best_on_test=0.01)
    return TEMPLATE.model_copy(update={"spec": spec, "numerics": 1, "ema": errors, "raw": None, **changes})


def evaluated(plan: Plan, errors: dict[str, np.ndarray | list[float]]) -> Results:
    """The claims of a plan on synthetic records with these errors, one per split."""
    runs = {
        spec: Run(record(spec, float(error)), f"runs/{name}/split{spec.split}-seed0")
        for name, values in errors.items()
        for spec, error in zip(plan.specs(name), values, strict=True)
    }
    return evaluate_claims(plan, runs.get)


def test_the_claimed_directions_are_those_of_the_printed_values() -> None:
    """At the setting of the paper's analyses, wherever one of its tables prints both sides."""
    plan = plan_of(setting="cifar100@4", splits=(1,))
    large = {name: plan.specs(name)[0] for name in CONFIGURATIONS}
    bench = {name: replace(spec, **{"network.filters": 32}) for name, spec in large.items()}
    compared = 0
    for table in PAPER_TABLES.values():
        if table.analysis or table.name.startswith("main-"):
            continue
        cells = [cell for row in make_grid(table).cells for cell in row if cell and cell.printed]
        printed = {cell.specs[0]: cell.printed.mean for cell in cells if cell.printed and cell.specs[0].setting == "cifar100@4"}
        for one in (one for claim in CLAIMS for one in claim.comparisons if one.measure == "error"):
            for specs in (bench, large):
                lower, higher = printed.get(specs[one.lower]), printed.get(specs[one.higher])
                if lower is not None and higher is not None:
                    assert lower < higher + one.margin + 1e-9, (table.name, one)
                    compared += 1
    assert compared >= 30
    (best,) = [claim for claim in CLAIMS if claim.topic == "rows"]
    rivals = {one.higher for one in best.comparisons}
    for name in ("main-cifar", "main-svhn-stl", "main-mini"):
        values = {row.labels[0]: row.values for row in PAPER_TABLES[name].rows}
        assert values.keys() - {"CR-Match"} <= rivals
        for row in values.keys() - {"CR-Match"}:
            assert all(a.mean < b.mean for a, b in zip(values["CR-Match"], values[row], strict=True) if a and b)


def test_every_topic_of_the_issue_is_there_and_every_measure_is_known() -> None:
    assert TOPICS == (
        "main", "ablation", "direction", "pairs", "head", "threshold", "weights", "features", "pseudo-labels", "terms",
        "labels", "network", "rows", "beyond",
    )  # fmt: skip
    comparisons = [one for claim in CLAIMS for one in claim.comparisons]
    measures = Counter(measure for one in comparisons for measure in one.measures)
    assert {measure.partition(".")[0] for measure in measures} == {"error", "spread", "final", "probe", "distances"}
    assert {measure.partition(".")[2] for measure in measures if measure.startswith("final.")} <= TEMPLATE.final.keys()
    for analysis, known in (
        ("probe", {*TRANSFORMATIONS, STRONG_AGAINST_WEAK}),
        ("distances", {"-".join(pair) for pair in PAIRS}),
    ):
        assert {measure.partition(".")[2] for measure in measures if measure.startswith(f"{analysis}.")} <= known
    assert {name for one in comparisons for name in (one.lower, one.higher)} == CONFIGURATIONS.keys()


def test_the_order_of_other_rows_is_that_of_the_printed_column() -> None:
    claims = order_claims(parse_setting("svhn@25"))
    assert [(one.lower, one.higher) for claim in claims for one in claim.comparisons] == [
        ("FixMatch (RA)", "FixMatch (CTA)"), ("FixMatch (CTA)", "UDA"), ("UDA", "ReMixMatch"), ("ReMixMatch", "FeatMatch"),
        ("FeatMatch", "Mean Teacher"), ("Mean Teacher", "MixMatch"),
    ]  # fmt: skip
    ties = order_claims(parse_setting("cifar10@25"))
    assert ("FixMatch (CTA)", "FixMatch (RA)") not in [(one.lower, one.higher) for claim in ties for one in claim.comparisons]
    assert order_claims(parse_setting("digits@4")) == ()


def test_runs_are_shared_ordered_by_what_they_settle_and_come_split_by_split() -> None:
    plan = plan_of()
    specs = plan.grid.specs
    assert len(specs) == len(set(specs)) == 5 * len(plan.grid.rows)
    assert [spec.split for spec in specs] == sorted(spec.split for spec in specs)
    names = [row.labels[0] for row in plan.grid.rows]
    assert names[:3] == ["CR-Match", "CR-Inv", "without FeatDistLoss"]
    assert min(names.index(name) for name in ("UDA", "MixMatch", "PLCB")) > names.index("CR-Inv, strong-strong")
    assert [spec.setting for name in names if name.endswith(FEWER_LABELS) for spec in plan.specs(name)] == ["digits@1"] * 10
    ends = {claim: max(names.index(name) for name in claim.configurations) for claim in plan.claims}
    settled = [sum(end <= place for end in ends.values()) for place in range(len(names))]
    assert settled[9] >= 15, "ten runs per split settle many claims"


def test_some_topics_need_some_runs_and_wrong_requests_are_explained(tmp_path: Path) -> None:
    plan = plan_of("ablation", splits=(1,))
    assert {row.labels[0] for row in plan.grid.rows} == {"CR-Match", "without FeatDistLoss", "without RotNet", "without both"}
    assert plan.analyses() == []
    assert len(plan_of("features", splits=(1,)).analyses()) == 4
    with pytest.raises(RequestError, match=r"unknown topic 'abaltion'.\nDid you mean 'ablation'\?"):
        plan_of("abaltion")
    (tmp_path / "labeled" / "a").mkdir(parents=True)
    fixed = plan_of("network", "ablation", setting="mini_imagenet@40", splits=(1,))
    assert [claim.topic for claim, _ in fixed.impossible] == ["network"]
    assert {claim.topic for claim in fixed.claims} == {"ablation"}


def test_the_docs_give_runs_and_days_of_the_commands_at_the_papers_scale() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reproduce.md").read_text()
    assert ", ".join(TOPICS) in " ".join(text.split())
    rows = re.findall(r"`crmatch claims ([^`]*--setting (\S+)[^`]*)` \| (\d+) \| (\d+) \|", text)
    assert len(rows) == 3
    for arguments, setting, runs, days in rows:
        changes = {"network.filters": 32} if "--set network.filters=32" in arguments else {}
        plan = plan_of(*arguments.partition("--setting")[0].split(), setting=setting, changes=changes)
        costs = [estimate(spec, plan.grid.settings[spec.setting]) for spec in plan.grid.specs]
        assert int(runs) == len(costs)
        assert int(days) == pytest.approx(sum(cost.gpu_seconds or 0 for cost in costs) / 86_400, abs=0.6)


def test_true_differences_are_found_with_their_size_and_sign() -> None:
    random = np.random.default_rng(3)
    labels = random.normal(0, 5, 5)  # splits differ much more than methods: only pairing sees the difference

    def errors(mean: float) -> np.ndarray:
        return mean + labels + random.normal(0, 0.2, 5)

    plan = plan_of("main", "labels")
    results = evaluated(plan, {
        "CR-Match": errors(20), "FixMatch (RA)": errors(23), "FixMatch (CTA)": errors(18), "supervised only": errors(20),
        f"CR-Match{FEWER_LABELS}": errors(30), f"FixMatch (RA){FEWER_LABELS}": errors(35),
    })  # fmt: skip
    assert [one.verdict for one in results.tested] == ["holds", "does not hold", "undecided", "holds"]
    means = [one.findings[0].estimate.mean for one in results.tested]
    assert means == pytest.approx([3, -2, 0, 2], abs=0.4)
    assert {one.findings[0].estimate.n for one in results.tested} == {5}


def test_the_false_positive_rate_over_1000_tables_without_differences_is_5_percent() -> None:
    plan = plan_of("main")
    names = ["CR-Match", "FixMatch (RA)", "FixMatch (CTA)", "supervised only"]
    random = np.random.default_rng(0)
    verdicts, t_only, wrong_families = Counter[str](), 0, 0
    for _ in range(1000):
        splits = random.normal(20, 3, 5)
        results = evaluated(plan, {name: splits + random.normal(0, 1, 5) for name in names})
        verdicts += Counter(one.verdict for one in results.tested)
        t_only += sum((one.findings[0].estimate.p or 1) < 0.05 for one in results.tested)
        wrong_families += any(one.robust for one in results.tested)
    assert 0.04 < t_only / 3000 < 0.06
    assert 0.04 < (verdicts["holds"] + verdicts["does not hold"]) / 3000 < 0.06
    assert 0.4 < verdicts["holds"] / (verdicts["holds"] + verdicts["does not hold"]) < 0.6
    assert wrong_families / 1000 < 0.06, "with Holm's correction, 5 % of the tables have any bold verdict"


def test_only_splits_with_both_runs_count_and_other_measures_come_from_the_records(tmp_path: Path) -> None:
    plan = plan_of("pseudo-labels", "features", splits=(1, 2, 3))
    runs: dict[RunSpec, Run] = {}
    for name, splits, value in (
        ("CR-Match", (1, 2, 3), 10.0),
        ("without FeatDistLoss", (2, 3), 12.0),
        ("CR-Inv", (1, 3), 30.0),
    ):
        for spec in (spec for spec in plan.specs(name) if spec.split in splits):
            final = {"pseudo_label_error": value + spec.split, "contributing_error": value, "mask_rate": 70 + value}
            source = tmp_path / f"{name}-split{spec.split}-seed0.json"
            keys = ("translation", "scaling", "rotation", "color jitter", "strong against weak")
            probed = {key: {"mean": value + spec.split**2 * (name == "CR-Inv"), "std": 1, "n": 10} for key in keys}
            analysis_file(str(source), "probe").write_text(json.dumps(probed))
            runs[spec] = Run(record(spec, 5.0, final=final, per_class_error=[0.0, value]), str(source))
    results = {one.claim.text: one for one in evaluate_claims(plan, runs.get).tested}
    quality = results["FeatDistLoss lowers the error of all pseudo-labels"].findings[0].estimate
    assert (quality.mean, quality.n, quality.verdict) == (2.0, 2, "undecided")
    share = results["FeatDistLoss keeps the share of contributing images (loses at most 2 points)"].findings[0]
    assert share.estimate.mean == -2 + 2
    assert share.label == "mask rate: without FeatDistLoss < CR-Match + 2"
    spread = results["FeatDistLoss makes the errors of the classes more alike (26.49, 30.83)"].findings[0].estimate
    assert spread.mean == 1.0
    probe = results["Features of CR-Equiv reveal rotation better than those of CR-Inv (15.05, 21.92)"].findings[0].estimate
    assert (probe.mean, probe.n) == (20 + (1 + 9) / 2, 2)
    cosines = [one for text, one in results.items() if "weak views" in text and "tell" not in text]
    assert [one.verdict for one in cosines] == ["not tested", "not tested"]


def test_the_page_has_every_number_with_its_n_and_calls_nothing_confirmed_whose_interval_contains_zero() -> None:
    random = np.random.default_rng(1)
    plan = plan_of()
    results = evaluated(plan, {name: random.normal(10, 1, 5) for name in CONFIGURATIONS})
    page = to_page([results], "claims.png", "crmatch claims")
    rows = [line.split(" | ") for line in page.partition("## digits@4")[2].splitlines() if line.count(" to ") == 2]
    assert len(rows) == sum(finding.estimate.t is not None for one in results.tested for finding in one.findings) > 80
    for *_, difference, t, bootstrap, n, verdict in rows:
        assert n == "5"
        low, high = (float(bound.replace("−", "-")) for bound in t.split(" to "))
        assert low <= float(difference.replace("−", "-")) <= high
        positive = all(part.startswith("+") for interval in (t, bootstrap) for part in interval.split(" to "))
        negative = all(part.startswith("−") for interval in (t, bootstrap) for part in interval.split(" to "))
        assert ("does not hold" in verdict) == negative
        assert ("holds" in verdict) == positive
    assert "undecided (" in page
    assert "![Differences with their 95 % intervals](claims.png)" in page
    assert all(claim.text in page for claim in CLAIMS)
    empty = to_page([evaluated(plan, {})], "claims.png", "crmatch claims")
    assert "There are no runs yet." in empty
    assert "claims.png" not in empty
