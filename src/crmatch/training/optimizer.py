"""SGD and Adam over two parameter groups, built from a plan.

The arithmetic is torch's own (`torch.optim.sgd.sgd`, `torch.optim.adam.adam`). The classes of torch.optim are not used because
the first one that is created imports torch's compiler: more than a second at every start, and 70 MiB.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from crmatch.networks.network import Network
from crmatch.training.plan import TrainPlan

State = dict[str, Tensor]


class Optimizer:
    """The optimizer of a plan.

    Attributes:
        param_groups: `params`, `weight_decay` and the factor `rate` of the learning rate of each group.
        learning_rate: of the next step.
        state: tensors by name for each parameter that has had a gradient, by its index over all groups.
    """

    def __init__(self, network: Network, plan: TrainPlan) -> None:
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        # With one rate for all parameters there are two groups, as in checkpoints of earlier versions.
        slow = {id(parameter) for parameter in network.backbone.parameters()} if plan.backbone_rate != 1 else set()
        self.param_groups: list[dict[str, Any]] = []
        for rate in (1.0, plan.backbone_rate) if slow else (1.0,):
            own = [parameter for parameter in parameters if (id(parameter) in slow) == (rate != 1)]
            decays = [plan.decay_parameters == "all" or parameter.ndim > 1 for parameter in own]
            self.param_groups += [
                {
                    "params": [parameter for parameter, decay in zip(own, decays, strict=True) if decay is decaying],
                    "weight_decay": plan.weight_decay if decaying else 0.0,
                    "rate": rate,
                }
                for decaying in (True, False)
            ]
        self.learning_rate = plan.learning_rate
        self.state: dict[int, State] = {}
        self._plan = plan

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all groups; an index into this list is a key of `state`."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        first = 0
        for group in self.param_groups:
            indexed = [(first + i, parameter) for i, parameter in enumerate(group["params"]) if parameter.grad is not None]
            first += len(group["params"])
            if indexed:
                states = [self.state.setdefault(index, {}) for index, _ in indexed]
                parameters = [parameter for _, parameter in indexed]
                gradients = [parameter.grad for parameter in parameters]
                update = self._adam if self._plan.optimizer == "adam" else self._sgd
                update(parameters, gradients, states, self.learning_rate * group["rate"], group["weight_decay"])

    def _sgd(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], rate: float, decay: float
    ) -> None:
        buffers = [state.get("momentum_buffer") for state in states]
        sgd(
            parameters,
            gradients,
            buffers,
            lr=rate,
            weight_decay=decay,
            momentum=self._plan.momentum,
            nesterov=self._plan.nesterov,
            dampening=0.0,
            maximize=False,
            foreach=True,
        )
        for state, buffer in zip(states, buffers, strict=True):  # the first step creates the buffers
            if buffer is not None:
                state["momentum_buffer"] = buffer

    def _adam(
        self, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], rate: float, decay: float
    ) -> None:
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        adam(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=rate,
            weight_decay=decay,
            decoupled_weight_decay=self._plan.decay_rule == "decoupled",
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            foreach=True,
        )
