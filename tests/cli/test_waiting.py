"""How threads of the command wait for each other: chosen before torch is imported, from what else runs on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crmatch import __main__

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("text", "threads", "expected"),
    [
        ("0.5 0.4 0.3 1/80 12\n", "4", False),
        ("0.0 0.0 0.0 2/80 12\n", "4", True),
        ("0.0 0.0 0.0 2/80 12\n", "3", False),  # one of four cores is left for the other program
        ("0.0 0.0 0.0 3/80 12\n", "3", True),
        ("0.0 0.0 0.0 9/80 12\n", "many", False),
        ("strange", "4", False),
        (None, "4", False),
    ],
)
def test_programs_that_leave_too_few_cores_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, threads: str, expected: bool
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    load = tmp_path / "loadavg"
    if text is not None:
        load.write_text(text)
    assert __main__.cores_are_short(load) is expected


def test_a_system_without_these_functions_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert not __main__.cores_are_short(tmp_path / "loadavg")


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/loadavg").exists(), reason="the system does not say how many threads run")
def test_a_busy_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(os.cpu_count()))
    busy = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None
        busy.stdout.readline()  # it has started
        assert __main__.cores_are_short()
    finally:
        busy.kill()
        busy.communicate()


@pytest.mark.parametrize(
    ("given", "busy", "expected"),
    [
        ({}, False, {"GOMP_SPINCOUNT": "1000"}),
        ({}, True, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, True, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "7"}, False, {"GOMP_SPINCOUNT": "7"}),
    ],
)
def test_waiting_threads_sleep_beside_other_programs_and_what_the_user_set_stays(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], busy: bool, expected: dict[str, str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(__main__, "catch_signals", lambda: None)
    monkeypatch.setattr(__main__, "cores_are_short", lambda: busy)
    monkeypatch.setattr("crmatch.cli.app.main", lambda: None)
    __main__.main()
    assert {name: environment[name] for name in NAMES if name in environment} == expected
