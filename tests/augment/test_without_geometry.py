"""Policies for images without geometry: no operation moves a pixel."""

from __future__ import annotations

import pytest
import torch

from crmatch.augment.ctaugment import LEARNED_OPERATIONS
from crmatch.augment.operations import OPERATION_NAMES
from crmatch.augment.policies import build_policy
from crmatch.augment.variants import GEOMETRIC


@pytest.mark.parametrize("variant", ["paper", "google", "usb"])
def test_randaugment_without_geometry_draws_no_operation_that_moves_pixels(variant: str) -> None:
    for geometry in (True, False):
        draws = build_policy("randaugment", variant, True, geometry).draw(500, 16, 16, torch.Generator().manual_seed(0))
        names = {OPERATION_NAMES[place] for place in draws.operations.flatten().tolist()}
        assert bool(names & GEOMETRIC) == geometry
        assert {"equalize", "brightness", "solarize"} <= names


def test_ctaugment_without_geometry_draws_no_operation_that_moves_pixels() -> None:
    for geometry in (True, False):
        draws = build_policy("ctaugment", "paper", True, geometry).draw(500, 16, 16, torch.Generator().manual_seed(0))
        names = {list(LEARNED_OPERATIONS)[place] for place in draws.choices.flatten().tolist()}
        assert bool(names & GEOMETRIC) == geometry
        assert "invert" in names
