"""Optimizers and their parameter groups, built from a plan.

Own ones, equal to torch's to the bit (tested): the first torch.optim.Optimizer of a process imports torch's compiler, which
costs every start more than a second and, with sympy, 70 MiB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from crmatch.training.plan import TrainPlan


@dataclass
class Optimizer(ABC):
    """What the rules share: two groups of parameters, those that decay and those that do not.

    Attributes:
        param_groups: `params` and `weight_decay` of each, under the names torch's gradient scaler looks for.
        learning_rate: of the next step.
        state: tensors by name of each parameter that has had a gradient, by its number over all groups.
    """

    param_groups: list[dict[str, Any]]
    learning_rate: float
    state: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient; gradients are used up."""
        first = 0
        for group in self.param_groups:
            numbers = [first + place for place, parameter in enumerate(group["params"]) if parameter.grad is not None]
            parameters = [group["params"][number - first] for number in numbers]
            first += len(group["params"])
            if parameters:
                gradients = [parameter.grad for parameter in parameters]
                states = [self.state.setdefault(number, {}) for number in numbers]
                self._move(parameters, gradients, states, group["weight_decay"])

    @abstractmethod
    def _move(self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], decay: float) -> None:
        """Move `parameters` of one group; the state of one that never moved is empty."""


@dataclass
class Sgd(Optimizer):
    """g = gradient + decay w; v <- momentum v + g, at first v = g; w <- w - rate v, Nesterov: w - rate (g + momentum v)."""

    momentum: float
    nesterov: bool

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], decay: float) -> None:
        if decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if self.momentum:
            old = [place for place, state in enumerate(states) if state]
            if old:
                moving = [states[place]["momentum_buffer"] for place in old]
                torch._foreach_mul_(moving, self.momentum)
                torch._foreach_add_(moving, [gradients[place] for place in old])
            for state, gradient in zip(states, gradients, strict=True):
                if not state:
                    state["momentum_buffer"] = gradient.clone()
            velocities = [state["momentum_buffer"] for state in states]
            if self.nesterov:
                torch._foreach_add_(gradients, velocities, alpha=self.momentum)
            else:
                gradients = velocities
        torch._foreach_add_(parameters, gradients, alpha=-self.learning_rate)


@dataclass
class Adam(Optimizer):
    """m <- b1 m + (1 - b1) g, s <- b2 s + (1 - b2) g^2, w <- w - rate / (1 - b1^t) m / (sqrt(s) / sqrt(1 - b2^t) + eps).

    Decay is part of g (`l2`), or w shrinks by 1 - rate decay first (`decoupled`).
    """

    decoupled: bool
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def _move(self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], decay: float) -> None:
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
        if decay and self.decoupled:
            torch._foreach_mul_(parameters, 1 - self.learning_rate * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        first, second = self.betas
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        counts = [state["step"].item() for state in states]
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [(1 - second**count) ** 0.5 for count in counts])
        torch._foreach_add_(roots, self.epsilon)
        torch._foreach_addcdiv_(parameters, means, roots, [-(self.learning_rate / (1 - first**count)) for count in counts])


def build_optimizer(network: nn.Module, plan: TrainPlan) -> Optimizer:
    """The plan's optimizer with two groups: parameters that decay and parameters that do not."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    decays = [plan.decay_parameters == "all" or parameter.ndim > 1 for parameter in parameters]
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p, decay in zip(parameters, decays, strict=True) if decay],
            "weight_decay": plan.weight_decay,
        },
        {"params": [p for p, decay in zip(parameters, decays, strict=True) if not decay], "weight_decay": 0.0},
    ]
    if plan.optimizer == "adam":
        return Adam(groups, plan.learning_rate, plan.decay_rule == "decoupled")
    return Sgd(groups, plan.learning_rate, plan.momentum, plan.nesterov)
