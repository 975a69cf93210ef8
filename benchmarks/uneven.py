#!/usr/bin/env python3
"""Uneven classes, and unlabeled pictures that belong to no class: heads on eurosat_small, five draws.

    python benchmarks/uneven.py --data-dir DIR     # DIR/eurosat_small.npz; writes docs/results/uneven.md

The features are computed once (minutes); a head then takes seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from confidence import interval
from torch import Tensor

from crmatch.data.images import DataSet, ImageSet
from crmatch.data.splits import Split
from crmatch.losses import sharpen
from crmatch.runs.calibration import calibrate
from crmatch.runs.cross_validation import cross_validate
from crmatch.runs.features import HeadExperiment
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import RunSpec, replace
from crmatch.training.execution import Execution
from crmatch.training.loop import Observers, train
from crmatch.training.runtime import choose_runtime

DRAWS = 5
LARGEST, RATIO = (40, 200), 20  # labels and unlabeled pictures of the largest class; how many times more than of the smallest
KNOWN, LABELS, PICTURES = 7, 4, 100  # classes with labels, their labels and their unlabeled pictures
STRANGERS = (0, 300, 700)
SURE = 0.8
PAGE = """# Uneven classes, and pictures of no class

Heads on EfficientNet-Lite0 (96 pixels), eurosat_small, five random draws: mean ± half of the 95 % interval (Student's t).
Made by `python benchmarks/uneven.py`.

## Uneven classes

A class has from 40 down to 2 labels, and from 200 down to 10 unlabeled pictures ("uneven") or 80 ("even"). The first error is
the mean of the errors of the ten classes (n = 1,000 test pictures), the second that on pictures whose classes are as frequent
as those of the unlabeled ones. `--set data.balance=true` draws the labels of every class equally often; the last column is
what it changes in the first error, paired by draw.

{uneven}

## Pictures of no class

Seven random classes have 4 labels and 100 unlabeled pictures each; pictures of the other three classes, which have no label,
are added to the unlabeled ones. The error is that on the test pictures of the seven classes (n = 700). A model has no answer
"none of these": the last two columns tell how many test pictures of its classes, and of the other three (n = 300), get an
answer with a (calibrated) confidence of 0.8 or more.

{strangers}
"""


class Heads:
    """Heads on the stored features of a data set."""

    def __init__(self, workspace: Workspace) -> None:
        setting = workspace.setting("eurosat_small@4")
        self.specs = {name: recipe(setting, name, "head") for name in ("supervised", "crmatch")}
        self.data, self._split = workspace.load(self.specs["crmatch"])
        self.runtime, self._features = choose_runtime(Execution("cpu")), workspace.features
        assert self.data.test is not None
        self.labels, self.test_labels = self.data.train.labels, self.data.test.labels

    def experiment(self, spec: RunSpec, split: Split, classes: list[int]) -> HeadExperiment:
        """Only the given classes are known."""
        number = torch.full((self.data.train.classes + 1,), -1)
        number[classes] = torch.arange(len(classes))
        names = tuple(self.data.train.class_names[label] for label in classes)
        assert self.data.test is not None
        known, test = (ImageSet(part.images, number[part.labels], names) for part in (self.data.train, self.data.test))
        return HeadExperiment(spec, DataSet(known, test), split, self.runtime, self._features)

    def predict_test(self, experiment: HeadExperiment) -> Tensor:
        """Train a head and predict the test images."""
        training = experiment.training()
        train(training, Observers())
        found = experiment.test_predictions(experiment.evaluated(training.models))
        assert found is not None
        return found[0]


def draw(labels: Tensor, random: np.random.Generator, counts: list[tuple[int, int, int]]) -> Split:
    """A split with (class, labels, unlabeled pictures) of each class."""
    labeled, unlabeled = [], []
    for label, few, many in counts:
        rows = torch.from_numpy(random.permutation((labels == label).nonzero().flatten().numpy()))
        labeled.append(rows[:few])
        unlabeled.append(rows[few : few + many])
    rows = torch.cat(labeled)
    return Split(rows[labels[rows].argsort(stable=True)], torch.cat(unlabeled).sort().values)


def uneven(heads: Heads) -> list[str]:
    lines = [
        "| unlabeled pictures | model | mean over classes, % | as frequent as unlabeled, % | change |",
        "|---|---|---|---|---|",
    ]
    classes = list(range(heads.data.train.classes))
    for kind in ("uneven", "even"):
        found: dict[str, list[tuple[float, float]]] = {}
        for number in range(DRAWS):
            random = np.random.default_rng(number)
            shares = RATIO ** (-np.arange(len(classes)) / (len(classes) - 1))
            sizes = [(round(LARGEST[0] * share), round(LARGEST[1] * (share if kind == "uneven" else 0.4))) for share in shares]
            order = random.permutation(classes).tolist()
            counts = [(label, *size) for label, size in zip(order, sizes, strict=True)]
            split = draw(heads.labels, random, counts)
            frequency = np.array([many for _, _, many in sorted(counts)], float)
            for name, spec in heads.specs.items():
                for balance in (False, True):
                    changed = replace(spec, **{"data.balance": balance})
                    wrong = heads.predict_test(heads.experiment(changed, split, classes)).argmax(dim=1) != heads.test_labels
                    errors = np.array([100 * float(wrong[heads.test_labels == label].double().mean()) for label in classes])
                    title = f"{name}, balance" if balance else name
                    found.setdefault(title, []).append((errors.mean(), errors @ frequency / frequency.sum()))
        for title, values in found.items():
            without = found[title.removesuffix(", balance")]
            changes = [now - before for (now, _), (before, _) in zip(values, without, strict=True)]
            columns = [interval([value[place] for value in values]) for place in (0, 1)]
            lines.append(f"| {kind} | {title} | {' | '.join(columns)} | {interval(changes) if values != without else ''} |")
    return lines


def strangers(heads: Heads) -> list[str]:
    title = f"answered at {SURE}"
    lines = [
        f"| pictures of no class | model | error, % | {title}, % | of no class, {title}, % |",
        "|---|---|---|---|---|",
    ]
    for name, spec in heads.specs.items():
        for count in STRANGERS if name == "crmatch" else STRANGERS[:1]:  # labels alone do not see them
            values = []
            for number in range(DRAWS):
                random = np.random.default_rng(number)
                order = random.permutation(heads.data.train.classes).tolist()
                known, others = sorted(order[:KNOWN]), order[KNOWN:]
                extra = [(label, 0, -(-count // len(others))) for label in others]
                split = draw(heads.labels, random, [*((label, LABELS, PICTURES) for label in known), *extra])
                experiment = heads.experiment(spec, split, known)
                calibration = calibrate(None, cross_validate(experiment))
                assert calibration is not None
                probabilities = sharpen(heads.predict_test(experiment), calibration.temperature)
                is_known = torch.isin(heads.test_labels, torch.tensor(known))
                right = torch.tensor(known)[probabilities.argmax(dim=1)] == heads.test_labels
                sure = probabilities.amax(dim=1) >= SURE
                parts = (~right[is_known], sure[is_known], sure[~is_known])
                values.append([100 * float(part.double().mean()) for part in parts])
            share = f"{count} of {count + KNOWN * PICTURES}"
            lines.append(
                f"| {share} | {name} | " + " | ".join(interval(list(part)) for part in zip(*values, strict=True)) + " |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = Heads(Workspace.at(data_dir=options.data_dir))
    page = PAGE.format(uneven="\n".join(uneven(heads)), strangers="\n".join(strangers(heads)))
    print(page)
    (Path(__file__).resolve().parents[1] / "docs" / "results" / "uneven.md").write_text(page)


if __name__ == "__main__":
    main()
