"""Watches over a run: is everything finite, and does the run learn from its unlabeled images?"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from crmatch.errors import DivergedError

logger = logging.getLogger(__name__)
ADVICE = "Try a smaller plan.learning_rate"


class LateDivergenceError(DivergedError):
    """A value was not finite in some step since the last check; the first such step is not known yet."""


class FiniteWatch:
    """Checks the loss and the gradients of every step.

    If reading a value from the device is free (`immediate`), a bad step is known before it changes the weights. Otherwise a
    flag on the device collects bad steps, and is read at log points and before saving.
    """

    def __init__(self, immediate: bool) -> None:
        self.immediate = immediate
        self._flag: Tensor | None = None

    def bad_step(self, total: Tensor, gradients: Sequence[Tensor]) -> bool:
        """Whether this step is known to have a loss or gradient that is not finite; False if it is found out later."""
        # The largest magnitude is finite exactly if all values are; a sum could overflow.
        largest = torch._foreach_norm(list(gradients), math.inf) if gradients else ()
        bad = torch.stack([total.detach(), *largest]).isfinite().all().logical_not()
        if self.immediate:
            return bool(bad)
        self._flag = bad if self._flag is None else self._flag | bad
        return False

    def bad_since_last_check(self) -> bool:
        """Whether a step since the last call was bad; waits for the device."""
        flag, self._flag = self._flag, None
        return flag is not None and bool(flag)


CHECKS = 5
"""Consecutive log points that must agree before a warning."""
QUIET_SHARE = 0.15
"""Share of a run without warnings, because confidence comes late. In a run with 100 log points, a collapse is reported before a
quarter of it."""
QUIET_STEPS = 200
"""Steps without warnings; a shorter run is a trial."""
LOWEST_MASK_RATE = 0.1
"""Percent of pseudo-labels in use, below which the unlabeled images are practically unused."""
LARGEST_SHARE = 95.0
"""Percent of the pseudo-labels that one class may have. All are counted: the first ones in use are often of one class."""


class CollapseWatch:
    """Warns once if no pseudo-label is used any more, or if nearly all of them are of one class."""

    def __init__(self, class_names: Sequence[str], total_steps: int, device: torch.device) -> None:
        self._names, self._total = tuple(class_names), total_steps
        self._counts = torch.zeros(len(self._names), dtype=torch.int64, device=device)
        self._unused_checks = self._one_class_checks = 0

    def add(self, labels: Tensor) -> None:
        """Add a step's pseudo-labels (Bu,), without waiting for the device."""
        self._counts.index_add_(0, labels, torch.ones_like(labels))

    def check(self, line: Mapping[str, Any]) -> None:
        """Check a log point's curves and the classes of the pseudo-labels since the last one."""
        counts = self._counts.tolist()
        self._counts.zero_()
        rate = line.get("mask_rate")
        if rate is None or line["step"] < max(QUIET_STEPS, QUIET_SHARE * self._total):
            return
        self._unused_checks = self._unused_checks + 1 if rate < LOWEST_MASK_RATE else 0
        share = 100 * max(counts) / sum(counts)
        self._one_class_checks = self._one_class_checks + 1 if share > LARGEST_SHARE and len(counts) > 1 else 0
        if self._unused_checks == CHECKS:
            found = f"hardly any pseudo-label is confident enough to be used ({rate:.2g} %); the run uses its labels only"
            logger.warning("step %d: %s.\nLower method.threshold, or label a few more images.", line["step"], found)
        if self._one_class_checks == CHECKS:
            name = self._names[counts.index(max(counts))]
            found = f"{share:.0f} % of the pseudo-labels are {name!r}; the model may have collapsed onto that class"
            advice = "Check the labels of that class, label more of the others, or try a smaller plan.learning_rate."
            logger.warning("step %d: %s.\n%s", line["step"], found, advice)
