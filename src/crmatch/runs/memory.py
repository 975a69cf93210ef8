"""Whether a run fits: the estimate of `costs` against the memory that is free. Imports no torch."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from crmatch.data.settings import Setting
from crmatch.errors import RequestError
from crmatch.runs.cost import PROCESS_BYTES, estimate
from crmatch.spec.run_spec import RunSpec, replace

logger = logging.getLogger(__name__)
IGNORE = "CRMATCH_IGNORE_MEMORY"
"""Environment variable; 1 trains in spite of the estimate."""
CGROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Control groups of version 2 and 1: controller -> its folder, files of limit and use, and the key of memory.stat that counts
what the system drops when it must."""


def needed_bytes(spec: RunSpec, setting: Setting, recompute: bool = False, lean: bool = True) -> float:
    """What training takes beyond the process and its data, which are there already: activations and weights."""
    return estimate(spec, setting, recompute, lean).memory_bytes - PROCESS_BYTES


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that a process can still take: what the system has available, or less by a container's limit; None: unknown."""
    return min([*_available(root / "proc/meminfo"), *_below_limits(root)], default=None)


def check_memory(spec: RunSpec, setting: Setting, free: int | None, recompute: bool = False, lean: bool = True) -> None:
    """Raise before the first step where the run needs more than is free, naming what would make it fit."""
    needed = needed_bytes(spec, setting, recompute, lean)
    if free is None or needed <= free:
        return
    found = f"this run needs about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    if os.environ.get(IGNORE) == "1":
        logger.warning("%s; it is trained because %s=1", found, IGNORE)
        return
    raise RequestError(f"{found}.\n{_cure(spec, setting, free, recompute, lean)} ({IGNORE}=1 tries it all the same.)")


def _cure(spec: RunSpec, setting: Setting, free: int, recompute: bool, lean: bool) -> str:
    """Recomputing, which changes no result, or the largest batch of unlabeled images that fits, by halves, or what is large."""
    if needed_bytes(spec, setting, recompute=True, lean=lean) <= free:
        return "Fits: --recompute."
    size = spec.plan.unlabeled_batch_size // 2
    while size:
        smaller = replace(spec, **{"plan.unlabeled_batch_size": size})
        for recomputes in sorted({recompute, True}):
            if needed_bytes(smaller, setting, recomputes, lean) <= free:
                return f"Fits: {'--recompute ' * (recomputes and not recompute)}--set plan.unlabeled_batch_size={size}."
        size //= 2
    return "Use smaller images (--image-size), another network (network.filters) or smaller batches (plan.*_batch_size)."


def _available(path: Path) -> list[int]:
    found = [line.split() for line in _text(path).splitlines() if line.startswith("MemAvailable:")]
    return [1024 * int(words[1]) for words in found]


def _below_limits(root: Path) -> list[int]:
    """What is left below the limits of this process's control groups, as containers and clusters set them."""
    left = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controller, path = line.split(":", 2)
        if controller not in CGROUPS:
            continue
        folder, limit_name, use_name, droppable = CGROUPS[controller]
        base = root / "sys/fs/cgroup" / folder
        group = base / path.lstrip("/")
        for place in (group, *group.parents[: len(group.relative_to(base).parts)]):
            limit, use = _text(place / limit_name).strip(), _text(place / use_name).strip()
            if limit.isdigit() and use.isdigit():
                counts = dict(entry.split() for entry in _text(place / "memory.stat").splitlines())
                left.append(max(0, int(limit) - int(use) + int(counts.get(droppable, 0))))
    return left


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
