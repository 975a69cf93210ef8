"""A run that cannot fit is refused before its first step, and the estimate is near what a run takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import Command, tiny_spec
from crmatch.data.settings import parse_setting
from crmatch.distributed.process_group import ProcessGroup
from crmatch.errors import RequestError
from crmatch.runs.cost import PROCESS_BYTES, check_memory, estimate, free_bytes
from crmatch.spec.recipes import recipe
from crmatch.spec.run_spec import replace
from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime

GIB = 1 << 30
CIFAR = parse_setting("cifar10@4")
PAPER = recipe(CIFAR, "crmatch", "paper")


def needed(spec: Any, data_dir: Path) -> float:
    return estimate(spec, parse_setting(spec.setting, data_dir)).memory_bytes - PROCESS_BYTES


def test_the_paper_run_on_cifar_10_is_refused_on_a_small_machine_and_the_batch_named_would_fit() -> None:
    check_memory(PAPER, CIFAR, 16 * GIB)
    check_memory(PAPER, CIFAR, None)
    with pytest.raises(RequestError, match=r"needs about 5\.\d GB of memory, and 1\.1 GB are free") as refusal:
        check_memory(PAPER, CIFAR, GIB)
    _, advice = str(refusal.value).splitlines()
    assert "Fits: --recompute --set plan.unlabeled_batch_size=" in advice
    size = int(advice.partition("plan.unlabeled_batch_size=")[2].partition(".")[0])
    check_memory(replace(PAPER, **{"plan.unlabeled_batch_size": size}), CIFAR, GIB, "recomputed")
    with pytest.raises(RequestError, match="are free"):
        check_memory(replace(PAPER, **{"plan.unlabeled_batch_size": 2 * size}), CIFAR, GIB, "recomputed")


def test_recomputing_is_named_first_if_it_makes_a_run_fit() -> None:
    with pytest.raises(RequestError, match=r"are free.\nFits: --recompute\. "):
        check_memory(PAPER, CIFAR, 4 * GIB)
    check_memory(PAPER, CIFAR, 4 * GIB, "recomputed")
    with pytest.raises(RequestError, match=r"\nFits: --set plan\.unlabeled_batch_size="):
        check_memory(PAPER, CIFAR, GIB, "recomputed")


def test_if_no_batch_fits_the_other_switches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(PAPER, **{"network.filters": 2000})
    with pytest.raises(RequestError, match=r"network\.filters"):
        check_memory(spec, CIFAR, 4 * GIB)
    monkeypatch.setenv("CRMATCH_IGNORE_MEMORY", "1")
    check_memory(spec, CIFAR, 4 * GIB)


def test_a_run_that_cannot_fit_ends_with_code_2_before_it_writes(crmatch: Command, tmp_path: Path) -> None:
    arguments = ["--set", "plan.unlabeled_batch_size=65536", "--set", "network.filters=512", "--out", tmp_path / "runs"]
    outcome = crmatch("train", "digits@4", "--yes", *arguments)
    assert outcome.code == 2
    assert "are free" in outcome.err
    assert len(outcome.err.strip().splitlines()) == 2
    assert not (tmp_path / "runs").exists()


MEASURED = json.loads((Path(__file__).resolve().parents[2] / "docs" / "results" / "speed.json").read_text())["full_size"]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case["setting"])
def test_estimates_of_the_papers_runs_are_what_was_measured_or_a_little_more(case: dict[str, Any]) -> None:
    """A step of 2,304 images each; those of CIFAR-100 and STL-10 fit into 20 GiB with recomputing."""
    setting = parse_setting(case["setting"])
    spec = recipe(setting, "crmatch", "paper")
    cost = estimate(spec, setting, "recomputed" if case["recompute"] else "lean")
    assert 0.97 * case["peak_bytes"] < cost.memory_bytes < 1.25 * case["peak_bytes"]
    assert max(cost.memory_bytes, case["peak_bytes"]) < (20 if case["recompute"] else 12) * GIB
    lean, recomputed = (estimate(spec, setting, activations).memory_bytes for activations in ("lean", "recomputed"))
    assert lean - PROCESS_BYTES > 2 * (recomputed - PROCESS_BYTES), "recomputing takes less than half of the memory"


def test_what_is_stored_follows_the_execution_with_and_without_torch() -> None:
    choices = {"lean": Execution("cpu"), "recomputed": Execution("cpu", recompute=True), "kept": Execution("cpu", compile=True)}
    for expected, execution in choices.items():
        assert execution.activations == choose_runtime(execution).activations == expected
    assert Execution("cuda:0").activations == choose_runtime(processes=ProcessGroup(0, 2)).activations == "kept"


def test_double_precision_needs_twice_as_much_and_half_precision_half_of_the_activations(stripes: Path) -> None:
    half, single, double = (needed(tiny_spec(stripes, precision=precision), stripes) for precision in ("bf16", "fp32", "fp64"))
    assert double == pytest.approx(2 * single)
    assert half < single < 2 * half, "weights stay in fp32"


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
    (unit / "memory.current").write_text("1\n")
    for limit, free in (("max", 300_000), ("250001", 250_000)):
        (unit / "memory.max").write_text(f"{limit}\n")
        assert free_bytes(tmp_path) == free
    here = free_bytes()
    assert here is not None
    assert here > 1 << 26


MEASURE = """
import sys, torch
from pathlib import Path
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


@pytest.mark.process
def test_the_estimate_is_near_the_measured_peak(stripes: Path) -> None:
    """518 images of 16x16 through a WRN-28-2: neither refuses what fits easily, nor promises half of what it takes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEASURE, str(stripes)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    spec = tiny_spec(stripes, "fixmatch", **{"network.filters": 32, "plan.unlabeled_batch_size": 256})
    assert 0.6 < needed(spec, stripes) / int(answer.stdout) < 1.6
