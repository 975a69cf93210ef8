"""Attention to prototypes equals a loop over images, heads and prototypes."""

from __future__ import annotations

from typing import Any

import torch

from crmatch.networks.attention import AttentionRefiner
from crmatch.networks.dropout import dropout_from
from reference import featmatch_formulas as reference


def make_refiner(dropout: float = 0.0) -> tuple[AttentionRefiner, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    refiner = AttentionRefiner(8, 6, 4, dropout).double()
    with torch.no_grad():
        for parameter in refiner.parameters():
            parameter.normal_(generator=random)
    prototypes = torch.randn(6, 8, generator=random, dtype=torch.float64)
    refiner.remember(prototypes, torch.tensor([True, True, False, True, False, True]))
    return refiner, torch.randn(5, 8, generator=random, dtype=torch.float64)


def as_lists(layer: Any, rows: slice = slice(None)) -> tuple[list[Any], list[Any]]:
    return layer.weight[rows].tolist(), layer.bias[rows].tolist()


def test_refined_features_equal_the_loop_and_empty_places_do_not_count() -> None:
    refiner, features = make_refiner()
    embeddings = [as_lists(refiner.embedding, slice(2 * head, 2 * head + 2)) for head in range(4)]
    mixers = [as_lists(mixer) for mixer in refiner.mixers]
    there = refiner.prototypes[refiner.filled].tolist()
    expected = [
        reference.refined(feature, there, embeddings, mixers, as_lists(refiner.combination)) for feature in features.tolist()
    ]
    torch.testing.assert_close(refiner(features), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(refiner.eval()(features), torch.tensor(expected, dtype=torch.float64))


def test_without_prototypes_the_finished_model_keeps_its_features() -> None:
    features = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    fresh = AttentionRefiner(8, 6, 4).eval()
    with torch.no_grad():
        assert torch.equal(fresh(features), features)
        fresh.remember(torch.ones(6, 8), torch.ones(6, dtype=torch.bool))
        assert not torch.equal(fresh(features), features)


def test_dropout_takes_attention_in_training_only() -> None:
    refiner, features = make_refiner(dropout=0.5)
    with torch.no_grad():
        plain = refiner(features)
        with dropout_from(refiner, torch.Generator().manual_seed(0)):
            assert not torch.equal(refiner(features), plain)
            assert torch.equal(refiner.eval()(features), plain)


def test_prototypes_carry_no_gradient_and_every_weight_does() -> None:
    refiner, features = make_refiner()
    refiner(features).sum().backward()
    assert not refiner.prototypes.requires_grad
    assert all(parameter.grad is not None for parameter in refiner.parameters())
