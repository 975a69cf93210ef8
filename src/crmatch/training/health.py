"""Watches over a run: is everything finite, and does the run learn from its unlabeled images?"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

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


QUIET_SHARE = 0.15
"""Share of a run without warnings, because confidence comes late."""
UNUSED_STEPS, UNUSED_CHECKS = 200, 5
"""Pseudo-labels that are not used: steps without a warning, and consecutive log points that must agree before one."""
ONE_CLASS_STEPS, ONE_CLASS_CHECKS = 50, 3
"""The same for predictions of one class. With 30 log points or more, a collapse is reported in the first quarter of the run."""
LOWEST_MASK_RATE = 0.1
"""Percent of pseudo-labels in use, below which the unlabeled images are practically unused."""
LARGEST_SHARE = 95.0
"""Percent of the predictions that one class may have."""


class CollapseWatch:
    """Warns once if the model predicts one class for nearly all images, and once if hardly any pseudo-label is used."""

    def __init__(self, class_names: Sequence[str], total_steps: int) -> None:
        self._names, self._quiet = tuple(class_names), QUIET_SHARE * total_steps
        self._unused_checks = self._one_class_checks = 0

    def check_predictions(self, step: int, predict: Callable[[], Tensor]) -> None:
        """Check the classes (N,) that the model predicts for a sample of images, at a log point."""
        if step < max(ONE_CLASS_STEPS, self._quiet) or len(self._names) == 1:
            return
        counts = predict().bincount(minlength=len(self._names)).tolist()
        share = 100 * max(counts) / sum(counts)
        self._one_class_checks = self._one_class_checks + 1 if share > LARGEST_SHARE else 0
        if self._one_class_checks == ONE_CLASS_CHECKS:
            name = self._names[counts.index(max(counts))]
            found = f"the model predicts {name!r} for {share:.0f} % of a sample of images; it may have collapsed"
            advice = "Check the labels of that class, label more of the others, or try a smaller plan.learning_rate."
            logger.warning("step %d: %s.\n%s", step, found, advice)

    def check_use(self, step: int, mask_rate: float) -> None:
        """Check the percentage of pseudo-labels in use since the last log point."""
        if step < max(UNUSED_STEPS, self._quiet):
            return
        self._unused_checks = self._unused_checks + 1 if mask_rate < LOWEST_MASK_RATE else 0
        if self._unused_checks == UNUSED_CHECKS:
            found = f"hardly any pseudo-label is confident enough to be used ({mask_rate:.2g} %); the run uses its labels only"
            logger.warning("step %d: %s.\nLower method.threshold, or label a few more images.", step, found)
