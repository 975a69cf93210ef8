"""Optimizers and their parameter groups, built from a plan."""

from __future__ import annotations

import torch
from torch import nn

from crmatch.training.plan import TrainPlan


def build_optimizer(network: nn.Module, plan: TrainPlan) -> torch.optim.Optimizer:
    """The plan's optimizer with two groups: parameters that decay and parameters that do not."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    decays = [plan.decay_parameters == "all" or parameter.ndim > 1 for parameter in parameters]
    groups = [
        {
            "params": [p for p, decay in zip(parameters, decays, strict=True) if decay],
            "weight_decay": plan.weight_decay,
        },
        {"params": [p for p, decay in zip(parameters, decays, strict=True) if not decay], "weight_decay": 0.0},
    ]
    if plan.optimizer == "adam":
        decoupled = plan.decay_rule == "decoupled"
        return torch.optim.Adam(groups, lr=plan.learning_rate, decoupled_weight_decay=decoupled, foreach=True)
    return torch.optim.SGD(groups, lr=plan.learning_rate, momentum=plan.momentum, nesterov=plan.nesterov, foreach=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The same learning rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
