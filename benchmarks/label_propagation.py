#!/usr/bin/env python3
"""Cost of one refresh of deep label propagation (graph, linear systems, weights) by number of images.

    python benchmarks/label_propagation.py --threads 2

Features are random vectors of 128 dimensions in 100 noisy groups (the largest number of classes in the paper) with 10 labels
each. Each size runs in its own process, so that peak memory is measured separately. Writes docs/results/label-propagation.md
and .json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
WIDTH, CLASSES, LABELS_PER_CLASS, NEIGHBORS = 128, 100, 10, 50
Value = TypeVar("Value")


def resident_peak() -> int:
    """The largest resident memory of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(images: int, threads: int) -> dict[str, float]:
    """Seconds of each part and of a whole refresh, and memory without the features; runs in a child process."""
    import numpy as np
    import torch

    from crmatch.methods import propagation

    torch.set_num_threads(threads)
    random = torch.Generator().manual_seed(0)
    groups = torch.arange(images) % CLASSES
    features = torch.randn(CLASSES, WIDTH, generator=random)[groups] + 1.5 * torch.randn(images, WIDTH, generator=random)
    features = features.relu_()
    labels = torch.where(torch.arange(images) < CLASSES * LABELS_PER_CLASS, groups, -1)
    before = resident_peak()
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Value]) -> Value:
        started = time.perf_counter()
        result = call()
        seconds[name] = time.perf_counter() - started
        return result

    propagated = timed("refresh", lambda: propagation.propagate(features, labels, CLASSES))
    memory = resident_peak() - before
    unit = torch.nn.functional.normalize(features, dim=1)
    directed = timed("neighbors", lambda: propagation.affinity(unit, NEIGHBORS, 3.0))
    graph = timed("graph", lambda: propagation.normalized_graph(directed))
    sources = propagation.label_sources(labels.numpy(), CLASSES)
    blocks = np.split(sources, range(propagation.COLUMNS_PER_BLOCK, CLASSES, propagation.COLUMNS_PER_BLOCK), axis=1)
    timed("solve", lambda: [propagation.solve(graph, block, 0.99, 20, 1e-6) for block in blocks])
    wrong = (propagated.labels != groups).double().mean().item()
    return {"images": images, **seconds, "edges": graph.nnz, "memory": memory, "wrong": wrong}


def table(rows: list[dict[str, float]], threads: int) -> str:
    """The text of the page."""
    lines = [
        "# Cost of a label propagation",
        "",
        f"One refresh, without computing the features: {WIDTH} dimensions, k = {NEIGHBORS}, {CLASSES} classes, at most",
        f"20 iterations, {threads} thread{'s' * (threads > 1)}. Features are random, in noisy groups; memory excludes them.",
        "",
        "| images | refresh s | neighbors s | graph s | solve s | edges | peak MiB | wrong labels |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(f"{row[name]:.2f}" for name in ("refresh", "neighbors", "graph", "solve"))
        lines.append(
            f"| {row['images']:,} | {times} | {row['edges']:,} | {row['memory'] / 2**20:,.0f} | {100 * row['wrong']:.1f} % |"
        )
    first, last = rows[0], rows[-1]
    factor = last["images"] / first["images"]

    def exponent(name: str) -> float:
        return math.log(last[name] / first[name]) / math.log(factor) if factor > 1 else math.nan

    growth = f"N^{exponent('neighbors'):.2f} for the neighbors and as N^{exponent('solve'):.2f} for the solve"
    lines += [
        "",
        f"From {first['images']:,} to {last['images']:,} images, time grows as {growth}.",
        "The search for exact neighbors compares all pairs of images (N^2 inner products). The graph has at most 2 k N edges,",
        "so an iteration of the solver is linear in N until its vectors outgrow the cache. Memory is linear in N: one block of",
        "similarities (512 rows), the graph, and the values of all classes.",
        "",
        f"Made by `python benchmarks/label_propagation.py --threads {threads}` on {os.cpu_count()} cores with a load of "
        f"{os.getloadavg()[0]:.1f}; an idle",
        "machine is faster.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 20_000, 30_000, 40_000, 50_000], help="sizes")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.threads)))
        return
    rows: list[dict[str, Any]] = []
    for images in options.images:
        command = [sys.executable, __file__, "--child", str(images), "--threads", str(options.threads)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    page = table(rows, options.threads)
    print(page)
    (RESULTS / "label-propagation.md").write_text(page)
    (RESULTS / "label-propagation.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
