"""Means of everything a step reports, kept on the device between two log points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Meter:
    """Sums named scalars without waiting for the device; its state goes into checkpoints so that curves resume exactly."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.count = 0
        self._sum: Tensor | None = None

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Take in one step's scalars; the names must stay the same between two log points."""
        stacked = torch.stack([value.detach().to(torch.float64) for value in values.values()])
        if self._sum is None:
            self.names, self._sum = list(values), stacked
        else:
            assert self.names == list(values), f"a step reported {list(values)} after {self.names}"
            self._sum += stacked
        self.count += 1

    def means(self) -> dict[str, float]:
        """Means since the last call; starts anew."""
        if self._sum is None:
            return {}
        means = dict(zip(self.names, (self._sum / self.count).tolist(), strict=True))
        self.names, self.count, self._sum = [], 0, None
        return means

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"names": self.names, "count": self.count, "sum": [] if self._sum is None else self._sum.tolist()}

    def load_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from `state`."""
        self.names, self.count = list(state["names"]), int(state["count"])
        self._sum = torch.tensor(state["sum"], dtype=torch.float64, device=device) if self.names else None
