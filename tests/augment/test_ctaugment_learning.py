"""CTAugment on real images: strong distortions lose rate, and bins leave the support (minutes; `make slow-test`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import SHARED_DATA
from crmatch.data.settings import parse_setting
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace

CENTERED = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
STEPS = 300


def thirds(rates: dict[str, list[list[float]]]) -> tuple[float, float]:
    """Mean rate of the mildest and of the strongest third of the bins of rotate, shear, translate and solarize."""
    inner, outer = [], []
    for name in (*CENTERED, "solarize"):
        values = np.array(rates[name][0])
        position = (np.arange(len(values)) + 0.5) / len(values)
        strength = 1 - position if name == "solarize" else np.abs(position - 0.5)
        order = np.argsort(strength, kind="stable")
        third = len(values) // 3
        inner.append(values[order[:third]].mean())
        outer.append(values[order[-third:]].mean())
    return float(np.mean(inner)), float(np.mean(outer))


def left_the_support(rates: dict[str, list[list[float]]]) -> int:
    """Bins that training no longer draws: (rate + 0.01) below 0.8 of the parameter's largest."""
    return sum(
        int(((np.array(bins) + 0.01) / (max(bins) + 0.01) < 0.8).sum()) for parameters in rates.values() for bins in parameters
    )


def learned(setting: str, data_dir: Path | None, out: Path, method: str, **keys: Any) -> dict[str, Any]:
    spec = recipe(parse_setting(setting, data_dir), method, "quick")
    changes = {"plan.steps": STEPS, "augmentation.policy": "ctaugment", **keys}
    record = run(replace(spec, **changes), Workspace.at(out, data_dir))
    assert record.policy is not None
    return record.policy


@pytest.mark.slow
def test_on_digits_bins_leave_the_support(tmp_path: Path) -> None:
    assert left_the_support(learned("digits@4", None, tmp_path, "fixmatch")) >= 1


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the small real image sets are not on this machine")
@pytest.mark.parametrize("method", ["fixmatch", "crmatch"])
def test_on_photos_strong_distortions_lose_at_least_a_twentieth(tmp_path: Path, method: str) -> None:
    """With FixMatch's 64 labeled images per step: 300 steps of `quick`'s 16 give each bin only 30 updates of 1 %."""
    rates = learned("cifar10_small@25", SHARED_DATA, tmp_path, method, **{"plan.labeled_batch_size": 64})
    inner, outer = thirds(rates)
    assert outer <= inner - 0.05
    assert left_the_support(rates) >= 1
