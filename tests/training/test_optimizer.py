"""The optimizers move weights exactly as torch's do, and importing torch's compiler is not part of a start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crmatch.training.optimizer import Optimizer
from crmatch.training.plan import TrainPlan


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3), nn.Linear(5, 2))


def torchs(network: nn.Module, plan: TrainPlan) -> torch.optim.Optimizer:
    decaying = [parameter for parameter in network.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in network.parameters() if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": plan.weight_decay},
        {"params": others, "weight_decay": 0},
    ]
    if plan.optimizer == "adam":
        decoupled = plan.decay_rule == "decoupled"
        return torch.optim.Adam(groups, lr=plan.learning_rate, decoupled_weight_decay=decoupled, foreach=True)
    return torch.optim.SGD(groups, lr=plan.learning_rate, momentum=plan.momentum, nesterov=plan.nesterov, foreach=True)


@pytest.mark.parametrize(
    "plan",
    [
        TrainPlan(steps=1, weight_decay=0.01),
        TrainPlan(steps=1, weight_decay=0.0, nesterov=False),
        TrainPlan(steps=1, weight_decay=0.01, momentum=0.0, nesterov=False),
        TrainPlan(steps=1, weight_decay=0.01, optimizer="adam", decay_rule="decoupled"),
        TrainPlan(steps=1, weight_decay=0.01, optimizer="adam"),
    ],
    ids=["nesterov", "momentum", "plain", "adam decoupled", "adam"],
)
def test_weights_and_state_are_torchs_to_the_bit(plan: TrainPlan) -> None:
    own, reference = layers(), layers()
    optimizer, expected = Optimizer(own, plan), torchs(reference, plan)
    random = torch.Generator().manual_seed(1)
    for step in range(6):
        rate = 0.03 / (step + 1)
        optimizer.learning_rate = rate
        for group in expected.param_groups:
            group["lr"] = rate
        for number, (a, b) in enumerate(zip(own.parameters(), reference.parameters(), strict=True)):
            if number == 2 and step in (0, 3):  # a gradient that comes late, and one that is missing once
                a.grad = b.grad = None
                continue
            gradient = torch.randn(a.shape, generator=random)
            a.grad, b.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in own.parameters())
        assert all(torch.equal(a, b) for a, b in zip(own.parameters(), reference.parameters(), strict=True))
    kept = {
        number: {name: value for name, value in state.items() if value is not None}
        for number, state in expected.state_dict()["state"].items()
    }
    for number, state in optimizer.state.items():
        assert set(state) == set(kept.get(number, {}))
        assert all(torch.equal(tensor, kept[number][name]) for name, tensor in state.items())
    assert {number for number, state in kept.items() if state} == {number for number, state in optimizer.state.items() if state}


@pytest.mark.process
def test_a_training_step_imports_neither_torchs_compiler_nor_sympy(tmp_path: Path) -> None:
    code = (
        "import sys; from crmatch.__main__ import main\n"
        f"sys.argv = ['crmatch', 'train', 'digits@4', '--steps', '2', '--json', '--out', {str(tmp_path)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "found = {'torch._dynamo', 'sympy'} & set(sys.modules)\nassert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
