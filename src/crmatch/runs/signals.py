"""Signals that ask a command to save and end. Imported before everything heavy, so that no signal arrives too early."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Ctrl-C, and what clusters send before they take a machine away."""
STOPPED = 75
"""Exit code after such a signal (EX_TEMPFAIL: run the same command again to resume); after Ctrl-C it is 130."""
PARENT = "CRMATCH_PARENT"
"""Environment variable with the id of the process that started this one and reads its result: it stops if that one dies."""


class StopRequest:
    """Receives the signals of this process; calling it tells whether one has arrived.

    Until the training loop first polls it there is nothing to save, and a signal ends the process at once. Afterwards the
    first signal only sets a flag, and a second one ends the process.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.signal: int | None = None
        self.quiet, self._polled = quiet, False
        self._process, self._parent = os.getpid(), os.environ.get(PARENT)
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        """Whether to save and end."""
        self._polled = True
        return self.signal is not None or self._parent not in (None, str(os.getppid()))

    @property
    def exit_code(self) -> int:
        """Exit code of the process after the signal that arrived."""
        return 130 if self.signal == signal.SIGINT else STOPPED

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked helper has nothing to save: it dies silently
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = number
        if not (self._polled and self.quiet):
            saving = "finishing this step and saving; press again to end at once"
            text = saving if self._polled else "crmatch: stopped by a signal; there was nothing to save yet."
            # Unbuffered: a handler may interrupt a write to sys.stderr, which cannot be entered twice.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{text}\n".encode())
        if not self._polled:
            while frame is not None:  # a module that is being imported may catch the exception, or lose it
                if frame.f_code.co_filename.startswith("<frozen importlib"):
                    os._exit(self.exit_code)
                frame = frame.f_back
            raise SystemExit(self.exit_code)


_current: StopRequest | None = None


def catch_signals(quiet: bool = False) -> StopRequest:
    """A new request that receives the signals of this process from now on; a quiet one prints nothing while saving."""
    global _current
    _current = StopRequest(quiet)
    return _current


def stop_request() -> StopRequest:
    """The request of the running command."""
    return _current or catch_signals()
