"""MixUp: shares from a Beta distribution, partners from a permutation, and mixing row by row."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from crmatch.methods.mixup import Mixing, draw_mixing
from reference import baseline_formulas as reference


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 4, 4)])
@pytest.mark.parametrize("partner", ["random", "reversed"])
def test_mixing_equals_the_loop_over_rows(shape, partner):
    mixing = draw_mixing(torch.empty(7), 0.75, generator(), partner=partner)
    values = torch.randn(shape, generator=generator(1), dtype=torch.float64)
    expected = reference.mixed(values.numpy(), mixing.share.tolist(), mixing.partner.tolist())
    np.testing.assert_allclose(mixing.apply(values).numpy(), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.75, 2.0])
def test_shares_follow_the_beta_distribution(alpha):
    shares = draw_mixing(torch.empty(4000), alpha, generator(), keep_larger=False).share.numpy()
    assert scipy.stats.kstest(shares, scipy.stats.beta(alpha, alpha).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [0.25, 0.5, 0.75])
def test_the_larger_share_stays_with_the_image_itself(alpha):
    plain = draw_mixing(torch.empty(500), alpha, generator(), keep_larger=False)
    larger = draw_mixing(torch.empty(500), alpha, generator())
    assert larger.share.tolist() == [max(share, 1 - share) for share in plain.share.tolist()]
    assert torch.equal(larger.partner, plain.partner)
    assert (plain.share < 0.5).any()


def test_each_image_has_a_share_of_its_own_or_the_batch_has_one():
    assert len(set(draw_mixing(torch.empty(50), 0.5, generator()).share.tolist())) == 50
    batch = draw_mixing(torch.empty(50), 0.5, generator(), per="batch")
    assert len(set(batch.share.tolist())) == 1
    assert batch.share.shape == batch.partner.shape == (50,)


@pytest.mark.parametrize("count", [1, 2, 5, 64])
def test_partners_are_a_permutation_or_the_reversed_batch(count):
    assert sorted(draw_mixing(torch.empty(count), 0.5, generator()).partner.tolist()) == list(range(count))
    assert draw_mixing(torch.empty(count), 0.5, generator(), partner="reversed").partner.tolist() == list(range(count))[::-1]


def test_partners_of_different_steps_differ_and_those_of_one_seed_do_not():
    one, again, other = (draw_mixing(torch.empty(64), 0.5, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one.partner, again.partner)
    assert torch.equal(one.share, again.share)
    assert not torch.equal(one.partner, other.partner)


def test_the_kind_of_number_is_kept_and_whole_shares_change_nothing():
    values = torch.randn(5, 3, generator=generator())
    whole = Mixing(torch.ones(5, dtype=torch.float64), torch.arange(4, -1, -1))
    assert torch.equal(whole.apply(values), values)
    assert draw_mixing(torch.empty(5), 0.5, generator()).apply(values).dtype == torch.float32
