"""Cross-validation over the labels of a run with a frozen backbone: do the unlabeled images help, and do the features fit?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from crmatch.data.splits import Split
from crmatch.randomness import generator
from crmatch.runs.features import HeadExperiment
from crmatch.spec.run_spec import RunSpec, replace
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
        """Whether the classifier that uses unlabeled images is at least as good."""
        return self.semi_supervised <= self.supervised

    @property
    def features_fit(self) -> bool:
        """Whether the better classifier is clearly better than chance: right four times as often, or in half of the cases."""
        right = 100 - min(self.supervised, self.semi_supervised)
        return right >= min(50, 4 * 100 / self.classes)

    def lines(self) -> list[str]:
        """What the unlabeled images bring, and a warning if the features do not fit."""
        found = f"Cross-validation over {self.labels} labels: {self.supervised:.0f} % error from the labels alone"
        kept = "so the unlabeled images help" if self.unlabeled_help else "so the labels alone are the better choice here"
        lines = [f"{found}, {self.semi_supervised:.0f} % with the unlabeled images, {kept}."]
        if not self.features_fit:
            lines.append(
                "warning: the pretrained features hardly separate these classes.\n"
                "Train longer (--minutes 30), train from scratch (--backbone none), or label more images."
            )
        return lines


def gather_evidence(experiment: HeadExperiment, supervised: RunSpec, semi_supervised: RunSpec) -> Evidence:
    """Train both specs on three quarters of the labels, four times, and count errors on the other quarter."""
    return Evidence(
        supervised=_held_out_error(experiment, supervised),
        semi_supervised=_held_out_error(experiment, semi_supervised),
        labels=len(experiment.split.labeled),
        classes=experiment.data.train.classes,
    )


def _held_out_error(experiment: HeadExperiment, spec: RunSpec) -> float:
    labels = experiment.data.train.labels
    short = replace(spec, **{"plan.steps": STEPS, "plan.evaluate_every": STEPS})
    wrong = 0
    for held_out in folds(labels[experiment.split.labeled], spec.seed):
        rows = experiment.split.labeled[held_out]
        labeled = experiment.split.labeled[~held_out]
        # Held-out images are unlabeled images in training, as they would be if nobody had labeled them.
        fold = experiment.with_split(short, Split(labeled, torch.cat([experiment.split.unlabeled, rows])))
        training = fold.training()
        train(training, Observers())
        predicted = fold.predict(fold.evaluated(training.models), rows)
        wrong += int((predicted != labels[rows]).sum())
    return 100 * wrong / len(experiment.split.labeled)


def folds(labels: Tensor, seed: int) -> list[Tensor]:
    """Masks of the held-out labels of each fold: each class is spread evenly over the folds, and never held out as a whole."""
    number = torch.empty_like(labels)
    randomness = generator(seed, "folds")
    for label in sorted(set(labels.tolist())):
        rows = (labels == label).nonzero().flatten()
        order = torch.randperm(len(rows), generator=randomness)
        number[rows] = order % FOLDS if len(rows) > 1 else -1  # the only label of a class is never held out
    return [mask for fold in range(FOLDS) if (mask := number == fold).any()]
