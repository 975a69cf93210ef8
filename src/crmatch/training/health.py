"""Whether loss and gradients stay finite, without making the device wait, and where they first did not.

A watch for runs that compute on but learn nothing from the unlabeled images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from crmatch.errors import DivergedError

ADVICE = "Try a smaller plan.learning_rate"


class LateDivergenceError(DivergedError):
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


logger = logging.getLogger(__name__)
LOOKS = 5
"""Log points in a row that must agree before anything is said."""
QUIET_SHARE = 0.25
"""Share of a run in which nothing is said: confidence comes late, and the first pseudo-labels are often of one class."""
QUIET_STEPS = 200
"""Steps after which anything can be said at all: a run of fewer is a trial."""
FEWEST_USED = 0.1
"""Percent of pseudo-labels, below which the unlabeled images count as unused."""
LARGEST_SHARE = 95.0
"""Percent of the pseudo-labels used, above which one class has taken all."""


class CollapseWatch:
    """Warns once, in plain words, where no pseudo-label is used any more, or where all are of one class."""

    def __init__(self, class_names: Sequence[str], total_steps: int, device: torch.device) -> None:
        self._names, self._total = tuple(class_names), total_steps
        self._used = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        self._unused = self._one_class = 0

    def add(self, labels: Tensor, used: Tensor) -> None:
        """Take in a step's pseudo-labels (Bu,) and how much each counted (Bu,), without waiting for the device."""
        self._used.index_add_(0, labels, used.to(torch.float64))

    def look(self, line: Mapping[str, Any]) -> None:
        """Look at a log point's curves and at the classes used since the last one."""
        sums = self._used.tolist()
        self._used.zero_()
        rate = line.get("mask_rate")
        if rate is None or line["step"] < max(QUIET_STEPS, QUIET_SHARE * self._total):
            return
        self._unused = self._unused + 1 if rate < FEWEST_USED else 0
        share = 100 * max(sums) / sum(sums) if sum(sums) else 0.0
        self._one_class = self._one_class + 1 if share > LARGEST_SHARE and len(sums) > 1 else 0
        if self._unused == LOOKS:
            logger.warning(
                "step %d: hardly any pseudo-label is confident enough to be used (%.2g %%); the run learns from its labels "
                "alone.\nLower method.threshold, or label a few more images.",
                line["step"],
                rate,
            )
        if self._one_class == LOOKS:
            logger.warning(
                "step %d: %.0f %% of the pseudo-labels used are %r; the model may have collapsed onto that class.\n"
                "Check the labels of that class, label more of the others, or try a smaller plan.learning_rate.",
                line["step"],
                share,
                self._names[sums.index(max(sums))],
            )
