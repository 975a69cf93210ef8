"""Signals sent to a real process: before torch is there, in the middle of training, twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import TINY
from crmatch.runs.signals import SIGNALS

MODULE = [sys.executable, "-m", "crmatch"]
CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGUSR2: 75}
MANY_STEPS = ["--set=plan.steps=100000", "--set=plan.log_every=1", "--set=plan.checkpoint_every=100000"]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def catches(process: subprocess.Popen[str], number: int) -> bool:
    """Whether the process has a handler for a signal, as the system sees it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (number - 1) & 1)


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen([*MODULE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def training(data_dir: Path, out: Path) -> list[str]:
    assignments = [f"--set={key}={value}" for key, value in {**TINY, "method.rotation_images": 4}.items()]
    return ["train", "stripes@2", "--data-dir", str(data_dir), "--out", str(out), *assignments, *MANY_STEPS]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_torch_is_there_ends_at_once_with_nothing_to_save(
    stripes: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(training(stripes, tmp_path / "runs"))
    wait_for(lambda: catches(process, signal.SIGUSR2))
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == CODES[number]
    assert time.monotonic() - sent < 5
    assert err.strip() == "crmatch: stopped by a signal; there was nothing to save yet."
    assert out == ""
    assert not (tmp_path / "runs").exists()


def test_a_signal_while_torch_is_imported_ends_at_once(stripes: Path, tmp_path: Path) -> None:
    process = start(training(stripes, tmp_path / "runs"))
    wait_for(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err.strip() == "crmatch: stopped by a signal; there was nothing to save yet."


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_training_finishes_the_step_and_saves(stripes: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(training(stripes, tmp_path / "runs"))
    metrics: list[Path] = []
    wait_for(lambda: metrics.extend((tmp_path / "runs").rglob("metrics.jsonl")) or (metrics and metrics[0].stat().st_size))
    sent = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == CODES[number]
    assert time.monotonic() - sent < 10
    assert "finishing this step and saving" in err
    assert "The same command continues" in err
    assert "Traceback" not in err
    (saved,) = (metrics[0].parent / "checkpoint").iterdir()
    last = metrics[0].read_text().splitlines()[-1]
    assert f'"step": {int(saved.name[5:13])},' in last


def test_a_second_signal_ends_at_once(stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is one that never ends, so that only the second signal can end the process."""
    code = (
        "import sys, time\nfrom crmatch.runs.signals import catch_signals\nstop = catch_signals()\nstop()\n"
        "sys.stdout.write('ready\\n'); sys.stdout.flush()\nwhile True: time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.stderr is not None
    process.send_signal(signal.SIGTERM)
    process.stderr.readline()
    assert "finishing this step" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGUSR1


def test_a_forked_helper_dies_of_its_signal_and_says_nothing() -> None:
    code = (
        "import os, time\nfrom crmatch.runs.signals import catch_signals\ncatch_signals()()\nchild = os.fork()\n"
        "if not child:\n    time.sleep(60)\n    os._exit(0)\n"
        "time.sleep(0.2)\nos.kill(child, 15)\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, env=os.environ
    )
    assert answer.stdout == "-15\n"
    assert answer.stderr == ""
