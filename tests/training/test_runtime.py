"""What a run does to the process it is in is said in the log."""

from __future__ import annotations

import logging
import platform

import pytest

from crmatch.training.execution import Execution
from crmatch.training.runtime import choose_runtime, keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back and can be told not to")
def test_that_freed_memory_is_kept_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="crmatch")
    keep_freed_memory.cache_clear()
    choose_runtime(Execution("cpu", recompute=True))
    assert not caplog.messages
    choose_runtime(Execution("cpu"))
    choose_runtime(Execution("cpu"))
    assert caplog.messages == ["memory: glibc keeps what a step frees for the next one"]
