"""Golden losses: a change that is meant to keep the computation keeps these; one that is not raises `NUMERICS`.

A file names the numerics with which its losses last changed. `CRMATCH_UPDATE_GOLDEN=1 python -m pytest tests/test_golden.py`
writes those anew that have changed.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import QUICK, tiny_spec, training_of
from crmatch.methods import METHODS
from crmatch.spec.run_spec import NUMERICS

FOLDER = Path(__file__).parent / "golden"
POLICIES = ("randaugment", "ctaugment")
UPDATE = bool(os.environ.get("CRMATCH_UPDATE_GOLDEN"))
CASES = [tuple(file.stem.rsplit("-", 1)) for file in sorted(FOLDER.glob("*.txt"))]
FIRST_METHODS = 18
"""Methods that had golden losses when this line was written; a new one has them from the first update on."""


# Fixed here, so that a recipe can change without changing these losses.
FIXED: dict[str, Any] = {
    "plan.learning_rate": 0.003,  # small, because at the usual one a rounding error grows a hundredfold per step here
    "plan.ema_decay": 0.998,
    "plan.schedule": [{"shape": "cosine", "arc": 7 / 16}],
}


def losses(data_dir: Path, method: str, policy: str, precision: str, steps: int) -> list[float]:
    """Totals of the first steps."""
    keys = FIXED | {"augmentation.policy": policy, "precision": precision}
    if "threshold" in tiny_spec(data_dir, method).method.model_dump():
        keys["method.threshold"] = 0.4
    if method == "remixmatch":
        keys |= {"method.memory_batches": 64, "method.average_decay": 0.998}
    if method == "label_propagation":  # has a schedule of its own
        del keys["plan.schedule"]
    training = training_of(tiny_spec(data_dir, method, **keys), data_dir)
    return [training.take_step()[1].total.item() for _ in range(steps)]


def read(file: Path) -> list[float]:
    return [float(row.split()[1]) for row in file.read_text().splitlines()[1:]]


def close(one: list[float], other: list[float], tolerance: float) -> bool:
    return len(one) == len(other) and max(abs(a - b) for a, b in zip(one, other, strict=True)) <= tolerance


def test_numerics_is_that_of_the_last_change() -> None:
    found = {(FOLDER / f"{method}-{policy}.txt").read_text().splitlines()[0] for method, policy in CASES}
    assert max(int(line.removeprefix("numerics ")) for line in found) == NUMERICS


def test_no_golden_file_was_lost() -> None:
    assert len(CASES) >= FIRST_METHODS * len(POLICIES)
    assert {method for method, _ in CASES} <= METHODS.keys()


@pytest.mark.parametrize(("method", "policy"), list(itertools.product(METHODS, POLICIES)) if UPDATE else CASES)
def test_losses_stay_golden(stripes: Path, method: str, policy: str) -> None:
    file = FOLDER / f"{method}-{policy}.txt"
    actual = losses(stripes, method, policy, "fp64", 6 if QUICK and not UPDATE else 20)
    if UPDATE and not (file.exists() and close(actual, read(file), 1e-8)):
        lines = [f"numerics {NUMERICS}", *(f"{step} {loss:.12f}" for step, loss in enumerate(actual))]
        file.write_text("\n".join(lines) + "\n")
    expected = read(file)[: len(actual)]
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=0, atol=1e-8)
    if QUICK:
        return
    single = losses(stripes, method, policy, "fp32", 3)
    torch.testing.assert_close(torch.tensor(single), torch.tensor(expected[:3]), rtol=0, atol=1e-4)
