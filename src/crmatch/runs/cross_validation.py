"""Cross-validation over the labels of a run with a frozen backbone: do the unlabeled images help, and do the features fit?"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.data.splits import Split
from crmatch.randomness import generator
from crmatch.runs.calibration import Predictions
from crmatch.runs.features import HeadExperiment
from crmatch.runs.record import RunRecord
from crmatch.spec.run_spec import replace
from crmatch.training.loop import Observers, train

FOLDS = 4
STEPS = 300
"""Steps of a head in cross-validation; half of the recipe's."""


class Evidence(NamedTuple):
    """Errors in percent on labels that were held out.

    Attributes:
        supervised: of the classifier trained on the labels alone.
        semi_supervised: of the classifier trained on labeled and unlabeled images.
        labels: number of held-out labels.
        classes: number of classes.
    """

    supervised: float
    semi_supervised: float
    labels: int
    classes: int

    @property
    def unlabeled_help(self) -> bool:
        """Whether the classifier that uses unlabeled images is not worse by more than a standard error.

        It usually is the better one, which a few held-out labels cannot refute by a small difference.
        """
        return self.semi_supervised <= self.supervised + standard_error(self.supervised, self.labels)

    @property
    def features_fit(self) -> bool:
        """Whether the better classifier is clearly better than chance: right four times as often, or halfway to always."""
        right, chance = 1 - min(self.supervised, self.semi_supervised) / 100, 1 / self.classes
        return right >= min(4 * chance, (1 + chance) / 2)

    def lines(self) -> list[str]:
        """What the unlabeled images bring, and a warning if the features do not fit."""
        found = f"Cross-validation over {self.labels} labels: {self.supervised:.0f} % error from the labels alone"
        if self.supervised == self.semi_supervised:
            lines = [f"{found}, and the same with the unlabeled images."]
        else:
            kept = "so the unlabeled images help" if self.semi_supervised < self.supervised else "which is no clear difference"
            kept = kept if self.unlabeled_help else "so the labels alone are the better choice here"
            lines = [f"{found}, {self.semi_supervised:.0f} % with the unlabeled images, {kept}."]
        if not self.features_fit:
            lines.append(
                "warning: the pretrained features hardly separate these classes.\n"
                "Train longer (--minutes 30), train from scratch (--backbone none), or label more images."
            )
        return lines


def standard_error(error: float, labels: int) -> float:
    """Of an error of p percent on n labels, in percent: sqrt(p (100 - p) / n), or one label if that is more."""
    return max(100 / labels, math.sqrt(error * (100 - error) / labels))


def compare(supervised: RunRecord, semi_supervised: RunRecord) -> Evidence | None:
    """What two finished heads tell about the unlabeled images; None if one of them was not cross-validated."""
    alone, both = supervised.cross_validation, semi_supervised.cross_validation
    return Evidence(alone.error, both.error, both.labels, len(supervised.class_names)) if alone and both else None


def cross_validate(experiment: HeadExperiment) -> Predictions | None:
    """Train on a part of the labels, up to four times, and predict the rest: each label is held out once.

    None if every class has a single label, so that none can be held out.
    """
    labels, found = experiment.data.train.labels, []
    lengths = {"plan.steps": STEPS, "plan.unlabeled_epochs": None, "plan.evaluate_every": STEPS}
    short = replace(experiment.spec, **lengths)
    for held_out in folds(labels[experiment.split.labeled], experiment.spec.seed):
        rows = experiment.split.labeled[held_out]
        labeled = experiment.split.labeled[~held_out]
        # Held-out images are unlabeled images in training, as they would be if nobody had labeled them.
        fold = experiment.with_split(short, Split(labeled, torch.cat([experiment.split.unlabeled, rows])))
        training = fold.training()
        train(training, Observers())
        found.append((fold.predict(fold.evaluated(training.models), rows), labels[rows]))
    return (torch.cat([part for part, _ in found]), torch.cat([part for _, part in found])) if found else None


def folds(labels: Tensor, seed: int) -> list[Tensor]:
    """Masks of the held-out labels of each fold: each class is spread evenly over the folds, and never held out as a whole."""
    number = torch.empty_like(labels)
    randomness = generator(seed, "folds")
    for label in sorted(set(labels.tolist())):
        rows = (labels == label).nonzero().flatten()
        order = torch.randperm(len(rows), generator=randomness)
        number[rows] = order % FOLDS if len(rows) > 1 else -1  # the only label of a class is never held out
    return [mask for fold in range(FOLDS) if (mask := number == fold).any()]
