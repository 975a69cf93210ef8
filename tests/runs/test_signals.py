"""Signals sent to a real process: before torch is imported, in the middle of training, twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import tiny_command
from crmatch.runs.signals import SIGNALS

pytestmark = pytest.mark.process
CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGUSR2: 75}
MANY_STEPS = ["--set=plan.steps=100000", "--set=plan.log_every=1", "--set=plan.checkpoint_every=100000"]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(data_dir: Path, out: Path) -> subprocess.Popen[str]:
    return start("-m", "crmatch", *map(str, tiny_command(data_dir, out)), *MANY_STEPS)


def catches_signals(process: subprocess.Popen[str]) -> bool:
    """Whether the process has a handler for the last of the signals, as the system sees it."""
    caught = int(Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (SIGNALS[-1] - 1) & 1)


def loads_torch(process: subprocess.Popen[str]) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize(
    ("number", "moment"), [*((number, catches_signals) for number in SIGNALS), (signal.SIGTERM, loads_torch)]
)
def test_a_signal_before_training_ends_at_once_with_nothing_to_save(
    stripes: Path, tmp_path: Path, number: signal.Signals, moment: Callable[[subprocess.Popen[str]], bool]
) -> None:
    process = train(stripes, tmp_path / "runs")
    wait_for(lambda: moment(process))
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == CODES[number]
    assert time.monotonic() - sent < 5
    assert err.strip() == "crmatch: stopped by a signal; there was nothing to save yet."
    assert out == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_training_finishes_the_step_and_saves(stripes: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = train(stripes, tmp_path / "runs")
    metrics: list[Path] = []
    wait_for(lambda: metrics.extend((tmp_path / "runs").rglob("metrics.jsonl")) or (metrics and metrics[0].stat().st_size))
    sent = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == CODES[number]
    assert time.monotonic() - sent < 10
    assert "finishing this step and saving" in err
    assert "Resume with the same command" in err
    assert "Traceback" not in err
    (saved,) = (metrics[0].parent / "checkpoint").iterdir()
    last = metrics[0].read_text().splitlines()[-1]
    assert f'"step": {int(saved.name[5:13])},' in last


def test_a_second_signal_ends_at_once() -> None:
    """The step never ends, so that only the second signal can end the process."""
    code = (
        "import time\nfrom crmatch.runs.signals import catch_signals\ncatch_signals()()\n"
        "print('ready', flush=True)\nwhile True: time.sleep(60)"
    )
    process = start("-c", code)
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
    assert start("-c", code).communicate(timeout=30) == ("-15\n", "")
