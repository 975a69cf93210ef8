"""A run that cannot fit says so before its first step, and the estimate is near what a run takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crmatch.runs.memory import check_memory, free_bytes, needed_bytes

from conftest import Outcome, tiny_spec
from crmatch.data.settings import parse_setting
from crmatch.errors import RequestError
from crmatch.runs.cost import estimate
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace

CIFAR = parse_setting("cifar10@4")
GIB = 1 << 30


def test_the_paper_run_on_cifar_10_is_refused_on_a_small_machine_and_the_batch_named_would_fit() -> None:
    spec = recipe(CIFAR, "crmatch", "paper")
    check_memory(spec, CIFAR, 16 * GIB)
    check_memory(spec, CIFAR, None)
    with pytest.raises(RequestError, match=r"needs about 5\.\d GB of memory, and 1\.1 GB are free") as refusal:
        check_memory(spec, CIFAR, GIB)
    lines = str(refusal.value).splitlines()
    assert len(lines) == 2
    assert "Fits: --recompute --set plan.unlabeled_batch_size=" in lines[1]
    size = int(lines[1].partition("plan.unlabeled_batch_size=")[2].partition(".")[0])
    check_memory(replace(spec, **{"plan.unlabeled_batch_size": size}), CIFAR, GIB, recompute=True)
    with pytest.raises(RequestError, match="are free"):
        check_memory(replace(spec, **{"plan.unlabeled_batch_size": 2 * size}), CIFAR, GIB, recompute=True)


def test_recomputing_is_named_first_where_it_makes_a_run_fit() -> None:
    spec = recipe(CIFAR, "crmatch", "paper")
    with pytest.raises(RequestError, match=r"needs about 5\.\d GB of memory, and 4\.3 GB are free.\nFits: --recompute\. "):
        check_memory(spec, CIFAR, 4 * GIB)
    check_memory(spec, CIFAR, 4 * GIB, recompute=True)
    with pytest.raises(RequestError, match=r"\nFits: --set plan\.unlabeled_batch_size="):
        check_memory(spec, CIFAR, GIB, recompute=True)


MEASURED = json.loads((Path(__file__).resolve().parents[2] / "docs" / "results" / "speed.json").read_text())["full_size"]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case["setting"])
def test_estimates_of_the_papers_runs_are_what_was_measured_or_a_little_more(case: dict[str, Any]) -> None:
    """A step of 2,304 images each; those of CIFAR-100 and STL-10 fit into 20 GiB where they recompute."""
    setting = parse_setting(case["setting"])
    cost = estimate(recipe(setting, "crmatch", "paper"), setting, case["recompute"])
    assert 0.97 * case["peak_bytes"] < cost.memory_bytes < 1.25 * case["peak_bytes"]
    assert max(cost.memory_bytes, case["peak_bytes"]) < (20 if case["recompute"] else 12) * GIB


@pytest.mark.parametrize("name", ["cifar10@4", "cifar100@4", "stl10@100"])
def test_recomputing_takes_less_than_half_of_the_memory(name: str) -> None:
    setting = parse_setting(name)
    spec = recipe(setting, "crmatch", "paper")
    needed = needed_bytes(spec, setting, recompute=True)
    assert needed < 20 * GIB
    assert needed_bytes(spec, setting) > 2 * needed


def test_where_no_batch_fits_the_other_switches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(recipe(CIFAR, "crmatch", "paper"), **{"network.filters": 2000})
    with pytest.raises(RequestError, match=r"network\.filters"):
        check_memory(spec, CIFAR, 4 * GIB)
    monkeypatch.setenv("CRMATCH_IGNORE_MEMORY", "1")
    check_memory(spec, CIFAR, 4 * GIB)


def test_double_precision_needs_twice_as_much(stripes: Path) -> None:
    single, double = tiny_spec(stripes), tiny_spec(stripes, precision="fp64")
    setting = parse_setting("stripes@2", stripes)
    assert needed_bytes(double, setting) == pytest.approx(2 * needed_bytes(single, setting))


def test_half_precision_halves_activations_and_keeps_weights(stripes: Path) -> None:
    setting = parse_setting("stripes@2", stripes)
    single, half = (needed_bytes(tiny_spec(stripes, precision=precision), setting) for precision in ("fp32", "bf16"))
    twice = needed_bytes(tiny_spec(stripes, precision="bf16", **{"plan.unlabeled_batch_size": 24}), setting)
    assert half < single < 2 * half
    assert twice > half


def test_a_run_that_cannot_fit_ends_with_code_2_before_it_writes(crmatch: Callable[..., Outcome], tmp_path: Path) -> None:
    arguments = ["--set", "plan.unlabeled_batch_size=65536", "--set", "network.filters=512", "--out", tmp_path / "runs"]
    outcome = crmatch("train", "digits@4", *arguments)
    assert outcome.code == 2
    assert "are free" in outcome.err
    assert len(outcome.err.strip().splitlines()) == 2
    assert not (tmp_path / "runs").exists()


def test_free_memory_is_what_the_system_and_every_group_above_allow(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:    800 kB\n")
    assert free_bytes(tmp_path) == 800 * 1024
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job/step\n2:cpu:/\n0::/unit\n")
    step, job = tmp_path / "sys/fs/cgroup/memory/job/step", tmp_path / "sys/fs/cgroup/memory/job"
    step.mkdir(parents=True)
    for place, limit in ((step, 9223372036854771712), (job, 500_000)):
        (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (place / "memory.usage_in_bytes").write_text("300000\n")
        (place / "memory.stat").write_text("cache 5\ntotal_inactive_file 100000\n")
    assert free_bytes(tmp_path) == 300_000
    unit = tmp_path / "sys/fs/cgroup/unit"
    unit.mkdir()
    (unit / "memory.max").write_text("max\n")
    (unit / "memory.current").write_text("1\n")
    assert free_bytes(tmp_path) == 300_000
    (unit / "memory.max").write_text("250001\n")
    assert free_bytes(tmp_path) == 250_000


def test_this_machine_has_some_memory() -> None:
    free = free_bytes()
    assert free is not None
    assert free > 1 << 26


MEASURE = """
import sys, torch
from pathlib import Path
from typing import Any
from conftest import training_of, tiny_spec
torch.set_num_threads(1)
data_dir = Path(sys.argv[1])
spec = tiny_spec(data_dir, "fixmatch", **{"network.filters": 32, "plan.unlabeled_batch_size": 256})
training = training_of(spec, data_dir)
def status(key):  # unlike getrusage's, this peak does not begin with that of the parent process
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
before = status("VmRSS:")
for _ in range(3):
    training.take_step()
print(1024 * (status("VmHWM:") - before))
"""


def test_the_estimate_is_near_the_measured_peak(stripes: Path) -> None:
    """518 images of 16x16 through a WRN-28-2: neither refuses what fits by far, nor promises half of what it takes."""
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    command = [sys.executable, "-c", MEASURE, str(stripes)]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "PYTHONPATH": paths}
    )
    spec = tiny_spec(stripes, "fixmatch", **{"network.filters": 32, "plan.unlabeled_batch_size": 256})
    assert 0.6 < needed_bytes(spec, parse_setting("stripes@2", stripes)) / int(answer.stdout) < 1.6
