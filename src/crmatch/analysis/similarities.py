"""How far augmentation moves features: cosine similarity between original, weak and strong views."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from crmatch.analysis.curves import Summary, summarize
from crmatch.analysis.finished_run import draws, open_run
from crmatch.losses import cosine_similarity
from crmatch.runs.workspace import Workspace

PAIRS = (("weak", "original"), ("strong", "original"), ("weak", "strong"))


def similarities(run: Path | str, workspace: Workspace) -> dict[str, Summary]:
    """Cosine similarity of pooled features on the test set, one draw per image: mean and deviation over images.

    Keys are `weak-original`, `strong-original` and `weak-strong`.
    """
    finished = open_run(run, workspace)
    images = finished.test.images
    views = {
        "original": images,
        "weak": finished.weak(images, draws(0, "similarities/weak")),
        "strong": finished.strong(images, draws(0, "similarities/strong")),
    }
    return compare({name: finished.model.features(part) for name, part in views.items()})


def compare(features: dict[str, Tensor]) -> dict[str, Summary]:
    """Mean and standard deviation over images of the cosine similarity of each pair of (N, D) features."""
    return {
        f"{first}-{second}": summarize(cosine_similarity(features[first].double(), features[second].double()).tolist())
        for first, second in PAIRS
    }
