"""Whether loss and gradients stay finite, without making the device wait, and where they first did not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crmatch.errors import DivergedError

ADVICE = "Try a smaller plan.learning_rate"


class NoticedLateError(DivergedError):
    """Something was not finite since the last look; which step came first is not known yet."""


class FiniteWatch:
    """Looks at every step's loss and gradients.

    Where reading a value back is free (`immediate`), a bad step is known before it moves the weights. Elsewhere a flag on
    the device is or-ed every step and read at log points and before saving.
    """

    def __init__(self, immediate: bool) -> None:
        self.immediate = immediate
        self._flag: Tensor | None = None

    def bad_step(self, total: Tensor, gradients: Sequence[Tensor]) -> bool:
        """Whether this step's loss or gradients are known to be not finite; never true where it is found out later."""
        # The largest magnitude instead of a sum: it is finite exactly where all values are.
        largest = torch._foreach_norm(list(gradients), math.inf) if gradients else ()
        bad = torch.stack([total.detach(), *largest]).isfinite().all().logical_not()
        if self.immediate:
            return bool(bad)
        self._flag = bad if self._flag is None else self._flag | bad
        return False

    def bad_since_last_look(self) -> bool:
        """Whether a step since the last call was bad; waits for the device."""
        flag, self._flag = self._flag, None
        return flag is not None and bool(flag)


def first_divergence(take_step: Callable[[], object], steps: int) -> DivergedError | None:
    """Replay at most `steps` steps; returns what the first bad one says, None where all were good this time."""
    try:
        for _ in range(steps):
            take_step()
    except DivergedError as error:
        return error
    return None
