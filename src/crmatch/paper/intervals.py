"""Paired differences over splits: their mean, 95 % intervals, what these decide, and how many splits would decide it.

Imports no torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

LEVEL, POWER = 0.05, 0.8
RESAMPLES = 10_000
MOST_NEEDED = 1000
SAME = 1e-9
"""Differences whose standard deviation is below this are equal up to rounding; they say nothing about their spread."""
Verdict = Literal["holds", "does not hold", "undecided", "not tested"]


class Estimate(NamedTuple):
    """Mean and standard deviation of n paired differences; two 95 % intervals of the mean, and the p-value of the t-test.

    The last three are None if there are fewer than two differences, or if all of them are equal.
    """

    mean: float
    std: float
    n: int
    t: tuple[float, float] | None = None
    bootstrap: tuple[float, float] | None = None
    p: float | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the true difference is above zero: decided only if both intervals exclude zero."""
        if self.t is None or self.bootstrap is None:
            return "undecided" if self.n else "not tested"
        if min(*self.t, *self.bootstrap) > 0:
            return "holds"
        return "does not hold" if max(*self.t, *self.bootstrap) < 0 else "undecided"

    @property
    def splits_needed(self) -> int | None:
        """Splits with which the t interval would exclude zero in about 80 of 100 cases, if mean and deviation stay the same.

        The smallest n with |mean| sqrt(n) / std >= t(0.975, n - 1) + t(0.8, n - 1); None without an interval or above 1,000.
        """
        if self.t is None:
            return None
        counts = np.arange(2, MOST_NEEDED + 1)
        enough = abs(self.mean) * np.sqrt(counts) / self.std >= sum(student.ppf(q, counts - 1) for q in (1 - LEVEL / 2, POWER))
        return int(counts[enough.argmax()]) if enough.any() else None


def estimate(differences: Sequence[float]) -> Estimate:
    """Mean of paired differences with its t interval and its bootstrap interval (percentiles of resampled means)."""
    values, n = np.asarray(differences, dtype=np.float64), len(differences)
    if n == 0:
        return Estimate(math.nan, math.nan, 0)
    mean, std = float(values.mean()), float(values.std(ddof=1)) if n > 1 else 0.0
    if std < SAME:
        return Estimate(mean, std, n)
    error = std / math.sqrt(n)
    reach = float(student.ppf(1 - LEVEL / 2, n - 1)) * error
    low, high = np.quantile(_resampling(n) @ values, [LEVEL / 2, 1 - LEVEL / 2])
    p = 2 * float(student.sf(abs(mean) / error, n - 1))
    return Estimate(mean, std, n, (mean - reach, mean + reach), (float(low), float(high)), p)


def combine(estimates: Sequence[Estimate]) -> tuple[Verdict, float | None]:
    """The verdict on a claim that needs all differences to be above zero, and its p-value (None if it is undecided).

    It holds if all of them do. It does not hold if one is below zero, with Bonferroni's correction for their number: the lowest
    of many equal differences would otherwise often be below zero by chance.
    """
    verdicts, count = [one.verdict for one in estimates], len(estimates)
    if set(verdicts) == {"holds"}:
        return "holds", max(one.p or 0.0 for one in estimates)
    below = [count * one.p for one in estimates if one.verdict == "does not hold" and one.p is not None]
    if below and min(below) < LEVEL:
        return "does not hold", min(below)
    return ("not tested" if set(verdicts) == {"not tested"} else "undecided"), None


def holm(p_values: Sequence[float | None]) -> list[bool]:
    """Which tests stay significant together, by Holm's correction; None is a test that was not significant by itself."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    kept = [False] * len(p_values)
    for rank, (p, place) in enumerate(known):
        if p >= LEVEL / (len(p_values) - rank):
            break
        kept[place] = True
    return kept


@functools.cache
def _resampling(n: int) -> NDArray[np.float64]:
    """How much each of n differences weighs in each resample of n with replacement, (RESAMPLES, n); always the same draws."""
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES) / n
