#!/usr/bin/env python3
"""Errors of heads on a pretrained backbone, and of scikit-learn's classifiers on the same features.

    python benchmarks/backbones.py --data-dir DIR eurosat_small@4 cifar10_small@4      # packed sets DIR/<name>.npz
    python benchmarks/backbones.py --folders DIR signs@4                               # DIR/signs/{train,test}/<class>/*.jpg
    python benchmarks/backbones.py --page                                              # the page from backbones.json

Splits 1 to 3 are reported; the recipe was chosen on others. Results are added to docs/results/backbones.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SPLITS = (1, 2, 3)
COLUMNS = {
    "logistic": "logistic regression",
    "spreading": "LabelSpreading",
    "self_training": "SelfTrainingClassifier",
    "supervised": "head, labels only",
    "crmatch": "head, semi-supervised",
    "tune": "tuned",
}


def measure(setting: str, workspace: Any, minutes: float | None) -> dict[str, Any]:
    """Errors in percent and seconds of one split."""
    from crmatch.runs.features import HeadExperiment
    from crmatch.runs.run import run
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime

    name, _, number = setting.partition("#")
    specs = {method: spec_of(name, workspace, method, int(number or 1)) for method in ("supervised", "crmatch")}
    head = specs["crmatch"]
    started = time.perf_counter()
    data, split = workspace.load(head)
    experiment = HeadExperiment(head, data, split, choose_runtime(Execution("cpu")), workspace.features)
    found: dict[str, Any] = {"feature_seconds": time.perf_counter() - started}
    for method, spec in specs.items():
        record = run(spec, workspace)
        found |= {method: record.error, f"{method}_seconds": record.seconds}
    found |= by_scikit_learn(experiment)
    if minutes:
        found |= tuned(head, workspace, minutes)
    return found


def spec_of(name: str, workspace: Any, method: str, split: int) -> Any:
    from crmatch.spec.recipes import recipe
    from crmatch.spec.run_spec import replace

    return replace(recipe(workspace.setting(name), method, "head"), split=1 if "/" in name else split)


def tuned(head: Any, workspace: Any, minutes: float) -> dict[str, float]:
    from crmatch.runs.run import make_experiment, run
    from crmatch.runs.timing import fit_steps
    from crmatch.spec.recipes import recipe
    from crmatch.spec.run_spec import replace
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime

    spec = recipe(workspace.setting_of(head), "crmatch", "tune")
    spec = replace(spec, split=head.split, **{"plan.minutes": minutes})
    runtime = choose_runtime(Execution("cpu"))
    data, split = workspace.load(spec)
    experiment = make_experiment(spec, data, split, runtime, workspace, Execution("cpu"), None, lambda: False)
    record = run(fit_steps(experiment, 60 * minutes), workspace)
    assert record.error is not None
    return {"tune": record.error, "tune_seconds": record.seconds}


def by_scikit_learn(experiment: Any) -> dict[str, float]:
    """The same standardized features of the unaugmented images, for classifiers with their default parameters."""
    import torch
    from sklearn.linear_model import LogisticRegression
    from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier

    from crmatch.networks.pretrained.backbone import standardize

    def features(array: Any) -> Any:
        return standardize(torch.from_numpy(np.asarray(array, dtype=np.float32)), experiment.center).numpy()

    train, test = features(experiment.banks["none"][0]), features(experiment._test_features.flatten(start_dim=1))
    labels = np.full(len(train), -1)
    labeled = experiment.split.labeled.numpy()
    labels[labeled] = experiment.data.train.labels[labeled]
    logistic = LogisticRegression(max_iter=2000)
    models = {
        "logistic": logistic.fit(train[labeled], labels[labeled]),
        "spreading": LabelSpreading(kernel="knn", max_iter=100).fit(train, labels),
        "self_training": SelfTrainingClassifier(LogisticRegression(max_iter=2000), threshold=0.8).fit(train, labels),
    }
    truth = experiment.data.test.labels.numpy()
    return {name: 100 * float((model.predict(test) != truth).mean()) for name, model in models.items()}


def folder_of(source: Path, labels_per_class: int, draw: int, folder: Path) -> None:
    """A folder as a user has it: some labeled pictures of each class, the others unlabeled, and a test part."""
    random = np.random.default_rng(draw)
    number = 0
    for directory in sorted((source / "train").iterdir()):
        pictures = sorted(directory.iterdir())
        chosen = set(random.permutation(len(pictures))[:labels_per_class].tolist())
        for row, picture in enumerate(pictures):
            place = folder / "labeled" / directory.name if row in chosen else folder / "unlabeled"
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture, place / f"{number:05}{picture.suffix}")
            number += 1
    shutil.copytree(source / "test", folder / "test")


def write_page(results: dict[str, list[dict[str, Any]]]) -> None:
    """docs/results/backbones.md: mean and standard deviation over splits."""
    lines = [
        "# Pretrained backbones",
        "",
        "Test errors in percent: mean ± standard deviation over splits 1 to 3 (n in the second column), on a frozen",
        'EfficientNet-Lite0 with the recipe `head`. The column "tuned" trains the whole network afterwards (recipe `tune`;',
        "minutes in parentheses). Made by `python benchmarks/backbones.py`; figures in `backbones.json`. The recipe was",
        "chosen on other draws of eurosat_small, stl10_small and cifar10_small. Pictures below 96 pixels are enlarged to 96.",
        "scikit-learn's classifiers have the same features. Seconds are of two cores; features of a set are computed once and",
        "then reused (cifar10_small@25 reads those of cifar10_small@4).",
        "",
        "| set | n | " + " | ".join(COLUMNS.values()) + " | s for features | s for the head |",
        "|" + " --- |" * (len(COLUMNS) + 4),
    ]
    for setting, runs in results.items():
        cells = [summary([run[key] for run in runs if key in run]) for key in COLUMNS]
        tunes = [run["tune_minutes"] for run in runs if "tune_minutes" in run]
        cells[-1] += f" ({tunes[0]:g} min, n = {len(tunes)})" if tunes else ""
        # Only the first split computes features; the others reuse them.
        seconds = [f"{max(run[key] for run in runs):.0f}" for key in ("feature_seconds", "crmatch_seconds")]
        lines.append(f"| {setting} | {len(runs)} | " + " | ".join([*cells, *seconds]) + " |")
    (RESULTS / "backbones.md").write_text("\n".join(lines) + "\n")


def summary(errors: list[float]) -> str:
    if not errors:
        return "-"
    spread = f" ± {statistics.stdev(errors):.1f}" if len(errors) > 1 else ""
    return f"{statistics.mean(errors):.1f}{spread}"


def main() -> None:
    from crmatch.runs.workspace import Workspace

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="SET@LABELS_PER_CLASS")
    parser.add_argument("--data-dir", type=Path, help="where packed sets are")
    parser.add_argument("--folders", type=Path, help="where folders of pictures are")
    parser.add_argument("--splits", type=int, nargs="+", default=SPLITS)
    parser.add_argument("--minutes", type=float, help="also tune for this time")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "backbones", help="runs and features")
    parser.add_argument("--page", action="store_true", help="write the page from docs/results/backbones.json")
    options = parser.parse_args()
    file = RESULTS / "backbones.json"
    results: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.exists() else {}
    for setting in options.settings:
        for split in options.splits:
            name, _, labels = setting.partition("@")
            workspace = Workspace.at(options.work / "runs", options.data_dir)
            target = f"{setting}#{split}"
            if options.folders:
                folder = options.work / "folders" / f"{name}{labels}-{split}"
                if not folder.exists():
                    folder_of(options.folders / name, int(labels), split, folder)
                target = str(folder)
            found = measure(target, workspace, options.minutes)
            found |= {"split": split, **({"tune_minutes": options.minutes} if options.minutes else {})}
            others = [run for run in results.get(setting, []) if run["split"] != split]
            results[setting] = sorted([*others, found], key=lambda run: int(run["split"]))
            print(setting, split, {key: round(value, 2) for key, value in found.items()}, flush=True)
            file.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)


if __name__ == "__main__":
    main()
