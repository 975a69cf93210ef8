"""Signals that ask a run to save and end. Imported before everything heavy, so that none of them comes too early."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what clusters send before they take a machine away."""
STOPPED = 75
"""Exit code of a command that was asked to end (EX_TEMPFAIL: the same command again continues); of Ctrl-C it is 130."""


class StopRequest:
    """Asks a run to save and end when a signal arrives; a second signal ends at once.

    From the first time somebody asks, there is something to save and somebody who will save it. A signal before that ends
    the process at once.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self.signal: int | None = None
        self._asked = False
        self._process = os.getpid()

    @property
    def exit_code(self) -> int:
        """What the process ends with after the signal that arrived."""
        return 130 if self.signal == signal.SIGINT else STOPPED

    def install(self) -> StopRequest:
        """Receive this process's signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._handle)
        return self

    def __call__(self) -> bool:
        """Whether a signal has arrived."""
        self._asked = True
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked helper: it has nothing to save, and its parent does the talking
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.signal is not None:
            raise SystemExit(128 + number)
        else:
            self.signal = number
            if self._quiet and self._asked:
                return
            if self._asked:
                _say("\nfinishing this step and saving; press again to end at once\n")
            else:
                self._end(frame)

    def _end(self, frame: FrameType | None) -> None:
        _say("\ncrmatch: stopped by a signal; there was nothing to save yet.\n")
        if _importing(frame):  # half of a library's initialization may catch an exception, or lose it
            os._exit(self.exit_code)
        raise SystemExit(self.exit_code)


_current: StopRequest | None = None


def catch_signals(quiet: bool = False) -> StopRequest:
    """A new request that receives the signals of this process; a quiet one says nothing when it does."""
    global _current
    _current = StopRequest(quiet).install()
    return _current


def stop_request() -> StopRequest:
    """The request of the running command."""
    return _current or catch_signals()


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported somewhere below `frame`."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _say(text: str) -> None:
    """Straight to the terminal: a handler may interrupt a write of the buffered stream, which cannot be entered twice."""
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(2, text.encode())
