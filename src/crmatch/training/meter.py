"""Running means of what a step reports, kept on the device between two log points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type of sums on `device`: float64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


class Meter:
    """Sums named scalars without waiting for the device; its state goes into checkpoints so that curves resume exactly.

    A method may report other names after it enters another stage, so there is one sum per set of names.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, ...], tuple[int, Tensor]] = {}  # names -> number of steps, sums

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add one step's scalars."""
        stacked = torch.stack([value.detach().to(sum_dtype(value.device)) for value in values.values()])
        count, sums = self._groups.get(tuple(values), (0, 0.0))
        self._groups[tuple(values)] = count + 1, sums + stacked

    def means(self) -> dict[str, float]:
        """Means since the last call, each over the steps that reported its name; then resets."""
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        for names, (count, sums) in self._groups.items():
            for name, value in zip(names, sums.tolist(), strict=True):
                totals[name] = totals.get(name, 0.0) + value
                counts[name] = counts.get(name, 0) + count
        self._groups = {}
        return {name: total / counts[name] for name, total in totals.items()}

    def state(self) -> list[dict[str, Any]]:
        """Plain values for a checkpoint."""
        return [{"names": names, "count": count, "sum": sums.tolist()} for names, (count, sums) in self._groups.items()]

    def load_state(self, state: list[dict[str, Any]], device: torch.device) -> None:
        """Load `state`."""
        self._groups = {
            tuple(group["names"]): (group["count"], torch.tensor(group["sum"], dtype=sum_dtype(device), device=device))
            for group in state
        }
