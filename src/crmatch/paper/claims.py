"""The claims that compare configurations, the paper's and some beyond it, as data; and the runs that settle them.

Every claim says that a measure is lower in one configuration than in another. `verdicts.py` tests it. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from crmatch.data.settings import Setting
from crmatch.errors import RequestError, unknown_name_error
from crmatch.own_code import short_name
from crmatch.paper.grid import Grid, Overrides, make_grid, variant
from crmatch.paper.tables import INVARIANCE, NO_DISTANCE, NO_ROTATION, PAPER_TABLES, Column, PaperTable, Row
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec

FEWER_LABELS = ", fewer labels"
"""Ends the name of a configuration that is trained with fewer labels: 4 per class instead of more, or 1 instead of 4."""
ROBUST = 2.33
"""Percentage points between the highest and the lowest error of the paper's table of loss weights, which it calls robust."""


class Comparison(NamedTuple):
    """A measure that is claimed to be lower in one configuration than in another."""

    lower: str
    higher: str
    measure: str = "error"
    """error, spread (of the error over classes), final.KEY (of the curves), probe.KEY or distances.KEY (of an analysis)."""
    higher_measure: str | None = None  # if it is another one
    margin: float = 0.0  # how much higher the lower one may be
    gains: bool = False  # whether the difference is claimed to be larger with fewer labels

    @property
    def measures(self) -> tuple[str, str]:
        """The measures of both sides."""
        return self.measure, self.higher_measure or self.measure

    @property
    def configurations(self) -> list[str]:
        """Names of the configurations that must be trained."""
        return [name + end for end in ("", FEWER_LABELS)[: 1 + self.gains] for name in (self.lower, self.higher)]


class Claim(NamedTuple):
    """A claim in our words, where the paper makes it, and the comparisons that must all come out as it says."""

    topic: str
    place: str
    text: str
    comparisons: tuple[Comparison, ...]

    @property
    def configurations(self) -> list[str]:
        """Names of the configurations that must be trained."""
        return list(dict.fromkeys(name for comparison in self.comparisons for name in comparison.configurations))


def _row(name: str, changes: Mapping[str, Any] = {}, method: str = "crmatch", small: bool = False) -> Row:
    return Row((name,), "", changes, method, small)


_TABLE_ROWS = {row.labels[0]: row for name in ("main-cifar", "main-mini") for row in PAPER_TABLES[name].rows}
TABLE_1 = tuple(row.labels[0] for row in PAPER_TABLES["main-cifar"].rows)
OTHERS = tuple(name for name in _TABLE_ROWS if name != "CR-Match")
"""The other rows of the paper's Tables 1 and 2."""
RULES = {f"CR-Match with {title}'s rule": variant(f"crmatch+{rule}")[1] for title, rule in (
    ("FlexMatch", "flexmatch"), ("FreeMatch", "freematch"), ("SoftMatch", "softmatch"), ("AdaMatch", "adamatch"),
)}  # fmt: skip
CONFIGURATIONS = _TABLE_ROWS | {
    row.labels[0]: row
    for row in (
        _row("supervised only", method="supervised"),
        _row("without FeatDistLoss", NO_DISTANCE),
        _row("without RotNet", NO_ROTATION),
        _row("without both", NO_DISTANCE | NO_ROTATION),
        _row("without L_PL", {"method.pseudo_label_weight": 0.0}),
        _row("without L_S", {"method.supervised_weight": 0.0}),
        _row("CR-Inv", INVARIANCE),
        _row("L2 similarity", {"method.distance": "l2"}),
        _row("negative JS divergence", {"method.distance": "js"}),
        _row("L2 distance", {"method.distance": "l2"} | INVARIANCE),
        _row("JS divergence", {"method.distance": "js"} | INVARIANCE),
        *(_row(f"CR-Equiv, {pair}", {"method.pair": pair}) for pair in ("weak-weak", "strong-strong")),
        *(_row(f"CR-Inv, {pair}", {"method.pair": pair} | INVARIANCE) for pair in ("weak-weak", "strong-strong")),
        *(_row(f"(a), {name}", {"method.projection": key}) for name, key in (("no projection", "none"), ("MLP", "mlp"))),
        *(
            _row(f"(b), {name}", {"method.feature_point": "b", "method.projection": key})
            for name, key in (("no projection", "none"), ("linear", "linear"), ("MLP", "mlp"))
        ),
        _row("FeatDistLoss without threshold", {"method.distance_uses_threshold": False}),
        *(_row(f"threshold {tau:.2f}", {"method.threshold": tau}) for tau in (0.90, 0.92, 0.97, 0.99)),
        *(_row(f"weight {w:g} of L_PL + L_Dist", {"method.unlabeled_weight": w}) for w in (0.1, 5.0)),
        *(_row(f"weight {w:g} of L_Dist", {"method.feature_distance_weight": w}) for w in (0.1, 5.0)),
        _row("weight 0.1 of RotNet", {"method.rotation_weight": 0.1}),
        _row("CR-Match on a small network", small=True),
        *(_row(name, changes) for name, changes in RULES.items()),
    )
}
"""What is compared, by name: a method and the keys of its recipe that are changed."""


def _beats(name: str, *others: str, **options: Any) -> tuple[Comparison, ...]:
    return tuple(Comparison(name, other, **options) for other in others)


# fmt: off
CLAIMS = (
    Claim("main", "Tables 1, 2", "CR-Match has a lower error than FixMatch with RandAugment",
          _beats("CR-Match", "FixMatch (RA)")),
    Claim("main", "Tables 1, 2", "CR-Match has a lower error than FixMatch with CTAugment",
          _beats("CR-Match", "FixMatch (CTA)")),
    Claim("main", "Sources of appendix", "CR-Match has a lower error than training with the labeled images only",
          _beats("CR-Match", "supervised only")),
    Claim("ablation", "Table 3", "FeatDistLoss lowers the error, with and without RotNet",
          (Comparison("CR-Match", "without FeatDistLoss"), Comparison("without RotNet", "without both"))),
    Claim("ablation", "Table 3", "RotNet lowers the error, with and without FeatDistLoss",
          (Comparison("CR-Match", "without RotNet"), Comparison("without FeatDistLoss", "without both"))),
    Claim("ablation", "Table 3", "FeatDistLoss and RotNet together are best",
          _beats("CR-Match", "without FeatDistLoss", "without RotNet", "without both")),
    Claim("direction", "Table 4 left", "Increasing the cosine distance is better than decreasing it (45.52, 46.98)",
          _beats("CR-Match", "CR-Inv")),
    Claim("direction", "Table 4 left", "Increasing the L2 distance is better than decreasing it (46.22, 48.74)",
          _beats("L2 similarity", "L2 distance")),
    Claim("direction", "Table 4 left", "Increasing the JS divergence is better than decreasing it (46.46, 47.48)",
          _beats("negative JS divergence", "JS divergence")),
    Claim("direction", "Table 4 left", "Increasing the distance is better than no distance, with all three metrics",
          tuple(Comparison(name, "without FeatDistLoss") for name in ("CR-Match", "L2 similarity", "negative JS divergence"))),
    Claim("direction", "Table 4 left", "Decreasing the distance is better than no distance, with all three metrics",
          tuple(Comparison(name, "without FeatDistLoss") for name in ("CR-Inv", "L2 distance", "JS divergence"))),
    Claim("direction", "Table 4 left", "The cosine is the best of the three metrics",
          _beats("CR-Match", "L2 similarity", "negative JS divergence")),
    Claim("pairs", "Table 5", "For CR-Equiv, weak-strong pairs are better than weak-weak and strong-strong ones",
          _beats("CR-Match", "CR-Equiv, weak-weak", "CR-Equiv, strong-strong")),
    Claim("pairs", "Table 5", "For CR-Inv, weak-strong pairs are better than weak-weak and strong-strong ones",
          _beats("CR-Inv", "CR-Inv, weak-weak", "CR-Inv, strong-strong")),
    Claim("pairs", "Table 5", "CR-Equiv is better than CR-Inv with weak-weak and strong-strong pairs, too",
          tuple(Comparison(f"CR-Equiv, {pair}", f"CR-Inv, {pair}") for pair in ("weak-weak", "strong-strong"))),
    Claim("head", "Table 6", "Features at (a) with a linear projection are the best of six heads",
          _beats("CR-Match", "(a), no projection", "(a), MLP", "(b), no projection", "(b), linear", "(b), MLP")),
    Claim("head", "Table 6", "Without a projection, (b) is better than (a) (47.37, 48.37)",
          _beats("(b), no projection", "(a), no projection")),
    Claim("threshold", "Section 4.3", "FeatDistLoss is better with the confidence threshold than without (45.52, 46.94)",
          _beats("CR-Match", "FeatDistLoss without threshold")),
    Claim("threshold", "Appendix E", f"Thresholds from 0.90 to 0.99 cost at most {ROBUST} points",
          tuple(Comparison(f"threshold {tau}", "CR-Match", margin=ROBUST) for tau in ("0.90", "0.92", "0.97", "0.99"))),
    Claim("weights", "Appendix F", f"Weights of FeatDistLoss and RotNet from 0.1 to 5 cost at most {ROBUST} points",
          tuple(Comparison(f"weight {name}", "CR-Match", margin=ROBUST) for name in (
              "0.1 of L_PL + L_Dist", "5 of L_PL + L_Dist", "0.1 of L_Dist", "5 of L_Dist", "0.1 of RotNet"))),
    *(Claim("features", "Table 4 right", f"Features of CR-Equiv reveal {name} better than those of CR-Inv ({values})",
            _beats("CR-Match", "CR-Inv", measure=f"probe.{name}")) for name, values in (
              ("translation", "33.22, 36.80"), ("scaling", "11.09, 14.87"), ("rotation", "15.05, 21.92"),
              ("color jitter", "31.04, 35.99"))),
    Claim("features", "Section 4.3", "Features of CR-Equiv tell strong from weak views, those of CR-Inv do not (0.27, 46.18)",
          _beats("CR-Match", "CR-Inv", measure="probe.strong against weak")),
    Claim("features", "Appendix B", "CR-Equiv moves the features of strong views away from those of weak views and originals",
          tuple(Comparison("CR-Match", "CR-Inv", f"distances.{pair}") for pair in ("weak-strong", "strong-original"))),
    Claim("features", "Appendix B", "Features of weak views are closer to those of originals than features of strong views",
          tuple(Comparison(name, name, "distances.strong-original", "distances.weak-original")
                for name in ("CR-Match", "CR-Inv"))),
    Claim("pseudo-labels", "Appendix D", "FeatDistLoss lowers the error of all pseudo-labels",
          _beats("CR-Match", "without FeatDistLoss", measure="final.pseudo_label_error")),
    Claim("pseudo-labels", "Appendix D", "FeatDistLoss lowers the error of the contributing pseudo-labels",
          _beats("CR-Match", "without FeatDistLoss", measure="final.contributing_error")),
    Claim("pseudo-labels", "Appendix D", "FeatDistLoss keeps the share of contributing images (loses at most 2 points)",
          _beats("without FeatDistLoss", "CR-Match", measure="final.mask_rate", margin=2.0)),
    Claim("pseudo-labels", "Appendix C", "FeatDistLoss makes the errors of the classes more alike (26.49, 30.83)",
          _beats("CR-Match", "without FeatDistLoss", measure="spread")),
    Claim("terms", "Section 4.2", "Training fails without L_PL or without L_S (a run that diverges leaves no record)",
          _beats("CR-Match", "without L_PL", "without L_S")),
    Claim("labels", "Section 4.1", "CR-Match gains more over FixMatch with fewer labels",
          (Comparison("CR-Match", "FixMatch (RA)", gains=True),)),
    Claim("network", "Section 4.1", "CR-Match on a small network beats FixMatch on a large one (46.05, 48.85)",
          _beats("CR-Match on a small network", "FixMatch (RA)")),
    Claim("rows", "Tables 1, 2", "CR-Match has the lowest error of all rows of these tables", _beats("CR-Match", *OTHERS)),
    *(Claim("beyond", "not in the paper", f"{name} has the lowest error of all rows of Table 1", _beats(name, *TABLE_1))
      for name in RULES),
)
TOPICS = tuple(dict.fromkeys(claim.topic for claim in CLAIMS))
NOT_TESTED = (
    ("Section 4.1", "CR-Match needs fewer labels than FeatMatch for the same error (Mini-ImageNet, 40 and 100 labels)",
     "it compares two numbers of labels per class of one large data set"),
    ("Appendix C", "FeatDistLoss separates the classes better in t-SNE",
     "it is read off a picture (`crmatch figure tsne`); the spread of the error over classes is tested instead"),
    ("Figure 1", "equivariance generalizes better in a two-class toy", "it is a drawing; `crmatch figure teaser` trains one"),
)
"""Claims without a test: place, text, reason."""
# fmt: on


def order_claims(setting: Setting) -> tuple[Claim, ...]:
    """The order of the other rows in the column that the paper prints for this data set and number of labels, if any."""
    for table in (PAPER_TABLES[name] for name in ("main-cifar", "main-svhn-stl", "main-mini")):
        for place, column in enumerate(table.columns):
            if column.setting == f"{setting.stem}@{setting.labels_per_class}":
                values = [(row.values[place], row.labels[0]) for row in table.rows if row.labels[0] in OTHERS]
                printed = sorted((value.mean, name) for value, name in values if value)
                return tuple(
                    Claim("rows", table.number, f"{a} has a lower error than {b} ({x:.2f}, {y:.2f})", _beats(a, b))
                    for (x, a), (y, b) in itertools.pairwise(printed)
                    if x < y
                )
    return ()


class Plan(NamedTuple):
    """The claims about one setting, the grid of their runs, and the claims that cannot be tested on it, with the reason."""

    claims: tuple[Claim, ...]
    grid: Grid
    setting: Setting
    impossible: tuple[tuple[Claim, str], ...]

    def specs(self, configuration: str) -> tuple[RunSpec, ...]:
        """The run of each split."""
        row = [row.labels[0] for row in self.grid.rows].index(configuration)
        return next(cell.specs for cell in self.grid.cells[row] if cell)

    def analyses(self) -> list[tuple[RunSpec, str]]:
        """Runs that must be analyzed by `crmatch probe` or `crmatch distances`."""
        needed: dict[tuple[RunSpec, str], None] = {}
        for comparison in (comparison for claim in self.claims for comparison in claim.comparisons):
            for name, measure in zip((comparison.lower, comparison.higher), comparison.measures, strict=True):
                if (analysis := measure.partition(".")[0]) in ("probe", "distances"):
                    needed |= dict.fromkeys((spec, analysis) for spec in self.specs(name))
        return list(needed)


def make_plan(topics: Sequence[str], setting: str, overrides: Overrides, workspace: Workspace) -> Plan:
    """The claims of some topics (all if there are none) about a setting, and their runs in the order of training."""
    if wrong := [topic for topic in topics if topic not in TOPICS]:
        raise unknown_name_error("topic", wrong[0], TOPICS)
    asked = workspace.setting(setting)
    if asked.folder:
        raise RequestError(f"{setting} is a folder of pictures.\nClaims are tested on DATASET@LABELS_PER_CLASS, e.g. digits@4.")
    claims = [claim for claim in (*CLAIMS, *order_claims(asked)) if not topics or claim.topic in topics]
    fixed_size = not hasattr(recipe(asked, "crmatch", overrides.recipe).network, "filters")
    no_small = [claim for claim in claims if fixed_size and any(_row_of(name).small for name in claim.configurations)]
    claims = [claim for claim in claims if claim not in no_small]
    names = [setting, f"{setting.rpartition('@')[0]}@{4 if asked.labels_per_class > 4 else 1}"]
    rows = tuple(
        _row_of(name)._replace(labels=(name,), printed="|-" if name.endswith(FEWER_LABELS) else "-|")
        for name in training_order(claims)
    )
    columns = tuple(Column(short_name(name), name) for name in names)
    table = PaperTable("claims", "", f"claims about {asked.name}", ("configuration",), columns, rows)
    reason = "the network of this recipe has no smaller version"
    return Plan(tuple(claims), make_grid(table, overrides, workspace), asked, tuple((claim, reason) for claim in no_small))


def training_order(claims: Sequence[Claim]) -> list[str]:
    """The configurations: first those of the claim that needs fewest new runs, and of such claims that settles most others."""
    planned: dict[str, None] = {}
    left = list(claims)
    while left:
        sizes = [[name for name in claim.configurations if name not in planned] for claim in left]
        settled = [sum(set(other.configurations) <= {*planned, *new} for other in left) for new in sizes]
        first = min(range(len(left)), key=lambda place: (len(sizes[place]), -settled[place]))
        planned |= dict.fromkeys(sizes[first])
        del left[first]
    return list(planned)


def _row_of(configuration: str) -> Row:
    return CONFIGURATIONS[configuration.removesuffix(FEWER_LABELS)]
