"""Paired statistics: equal to scipy's, right about true differences, wrong as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from crmatch.paper.intervals import Estimate, combine, estimate, holm


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_mean_t_interval_and_p_value_are_those_of_scipy(n: int) -> None:
    random = np.random.default_rng(n)
    lower, higher = random.normal(20, 3, n), random.normal(22, 3, n)
    ours, test = estimate(higher - lower), stats.ttest_rel(higher, lower)
    interval = test.confidence_interval()
    assert ours.t == pytest.approx((interval.low, interval.high))
    assert ours.p == pytest.approx(test.pvalue)
    assert (ours.mean, ours.std, ours.n) == pytest.approx((np.mean(higher - lower), np.std(higher - lower, ddof=1), n))


@pytest.mark.parametrize("n", [3, 5, 30])
def test_the_bootstrap_interval_is_that_of_scipy_up_to_its_random_draws(n: int) -> None:
    values = np.random.default_rng(n).normal(1, 2, n)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=50_000, rng=1).confidence_interval
    ours = estimate(values)
    assert ours.bootstrap == pytest.approx((theirs.low, theirs.high), abs=0.03 * ours.std)
    assert estimate(values) == ours


def test_without_spread_nothing_is_decided() -> None:
    assert estimate([]).verdict == "not tested"
    for equal in ([4.0], [3.4 - 3.2, 2.8 - 2.6, 1.2 - 1.0], [0.0] * 5):  # the second ones differ by rounding
        assert (estimate(equal).t, estimate(equal).p, estimate(equal).verdict) == (None, None, "undecided")
        assert estimate(equal).splits_needed is None


def test_an_interval_that_contains_zero_confirms_nothing() -> None:
    for values in np.random.default_rng(0).normal(1, 1.5, (300, 5)):
        one = estimate(values)
        assert one.t is not None
        assert one.bootstrap is not None
        lows, highs = zip(one.t, one.bootstrap, strict=True)
        assert one.verdict == ("holds" if min(lows) > 0 else "does not hold" if max(highs) < 0 else "undecided")


@pytest.mark.parametrize("size", [0.8, 2.0])
def test_the_number_of_splits_needed_finds_a_true_difference_in_80_of_100_cases(size: float) -> None:
    needed = Estimate(size, 1.0, 5, t=estimate([0, 1]).t).splits_needed
    assert needed is not None
    random = np.random.default_rng(0)
    found = np.mean([estimate(random.normal(size, 1, needed)).verdict == "holds" for _ in range(1000)])
    assert 0.75 < found < 0.92
    fewer = np.mean([estimate(random.normal(size, 1, needed - 1)).verdict == "holds" for _ in range(1000)])
    assert fewer < found
    assert Estimate(1e-6, 1.0, 5, t=estimate([0, 1]).t).splits_needed is None


def test_a_claim_of_several_differences_needs_all_and_fails_by_one_that_is_clearly_below_zero() -> None:
    above, below, open_ = estimate([1, 1.1, 0.9, 1.2]), estimate([-1, -1.1, -0.9, -1.2]), estimate([1, -1, 0.5])
    weak = estimate([-1, -2, -4, -2.5])
    assert weak.verdict == "does not hold"
    assert combine([above, above]) == ("holds", above.p)
    assert combine([above, open_])[0] == combine([above, estimate([])])[0] == combine([open_, weak])[0] == "undecided"
    assert weak.p is not None
    assert combine([weak]) == ("does not hold", weak.p)
    assert combine([above, below]) == ("does not hold", pytest.approx(2 * (below.p or 0)))
    assert combine([estimate([])] * 2) == ("not tested", None)


def test_holm_keeps_the_smallest_p_values_one_after_the_other() -> None:
    assert holm([0.010, 0.04, 0.03, 0.005]) == [True, False, False, True]  # against 0.05 / 4, / 3, / 2, / 1
    assert holm([None, 0.02, None]) == [False, False, False]
    assert holm([None, 0.016]) == [False, True]
    assert holm([]) == []
