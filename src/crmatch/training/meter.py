"""Running means of what a step reports, kept on the device between two log points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Meter:
    """Sums named scalars without waiting for the device; its state goes into checkpoints so that curves resume exactly.

    A method may report other names after it enters another stage, so there is one sum per set of names.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one step's scalars."""
        names = tuple(values)
        stacked = torch.stack([value.detach().to(torch.float64) for value in values.values()])
        if names in self._sums:
            self._sums[names] += stacked
        else:
            self._sums[names] = stacked
        self._counts[names] = self._counts.get(names, 0) + 1

    def means(self) -> dict[str, float]:
        """Means since the last call, each over the steps that reported its name; then resets."""
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        for names, sums in self._sums.items():
            for name, value in zip(names, sums.tolist(), strict=True):
                totals[name] = totals.get(name, 0.0) + value
                counts[name] = counts.get(name, 0) + self._counts[names]
        self._sums, self._counts = {}, {}
        return {name: total / counts[name] for name, total in totals.items()}

    def state(self) -> list[dict[str, Any]]:
        """Plain values for a checkpoint."""
        return [
            {"names": list(names), "count": self._counts[names], "sum": sums.tolist()} for names, sums in self._sums.items()
        ]

    def load_state(self, state: list[dict[str, Any]], device: torch.device) -> None:
        """Load `state`."""
        self._counts = {tuple(group["names"]): int(group["count"]) for group in state}
        self._sums = {tuple(group["names"]): torch.tensor(group["sum"], dtype=torch.float64, device=device) for group in state}
