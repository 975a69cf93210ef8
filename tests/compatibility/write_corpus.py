"""Wrote `written_by_7ed868c/`: `git worktree add --detach OLD 7ed868c`, then `PYTHONPATH=OLD/src python write_corpus.py OUT`.

A finished run of CR-Match with CTAugment, one of supervised-only, and one of CR-Match stopped after step 5 of 8, on 18 images
that lie in `data/`; and the probabilities that the first one predicts for its test images.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from crmatch.results import run_directory

import crmatch
from crmatch.data.packed import read_packed
from crmatch.data.settings import parse_setting
from crmatch.errors import StoppedError


def main(out: Path) -> None:
    torch.set_num_threads(1)
    data_dir = out / "data"
    data_dir.mkdir(parents=True)
    random, labels = np.random.default_rng(0), np.repeat(np.arange(3), 6)
    images = random.integers(0, 80, (len(labels), 8, 8, 1), dtype=np.uint8)
    for row, label in enumerate(labels):
        images[row, label * 2 : (label + 1) * 2] += 150
    arrays = {"train_images": images, "train_labels": labels, "test_images": images[::2], "test_labels": labels[::2]}
    np.savez_compressed(data_dir / "stripes.npz", **arrays, class_names=np.array(["top", "middle", "bottom"]))
    keys = {"network.filters": 2, "network.scales": 1, "network.repeat": 1, "plan.steps": 8, "plan.labeled_batch_size": 2}
    keys |= {"plan.unlabeled_batch_size": 4, "plan.evaluate_every": 4, "plan.log_every": 2, "plan.checkpoint_every": 4}
    setting = parse_setting("stripes@2", data_dir)
    extra = {"method.rotation_images": 2, "augmentation.policy": "ctaugment"}
    for name, method, changes, steps in (
        ("finished", "crmatch", extra, 8),
        ("baseline", "supervised", {}, 8),
        ("stopped", "crmatch", {**extra, "seed": 1}, 5),
    ):
        spec = crmatch.replace(crmatch.recipe(setting, method, "quick"), **keys, **changes)
        answers = iter([False] * steps + [True])
        try:
            crmatch.run(spec, out / "runs", data_dir=data_dir, stop=lambda answers=answers: next(answers, True))
        except StoppedError:
            assert name == "stopped"
        run = run_directory(out / "runs", spec, setting).path
        (run / "run.lock").unlink(missing_ok=True)
        if name != "stopped":
            shutil.rmtree(run / "checkpoint")
        else:
            (run / "checkpoint" / min(file.name for file in (run / "checkpoint").iterdir())).unlink()
        shutil.move(run, out / name)
    shutil.rmtree(out / "runs")
    test = torch.from_numpy(read_packed(data_dir / "stripes.npz")["test_images"]).permute(0, 3, 1, 2)
    found = crmatch.load(out / "finished").predict_probabilities(test)
    (out / "probabilities.json").write_text(json.dumps(found.tolist()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
