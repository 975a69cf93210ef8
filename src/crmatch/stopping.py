"""Signals that ask a run to save and end."""

from __future__ import annotations

import signal
import sys


class StopRequest:
    """Asks a run to save and end when a signal arrives; a second signal ends at once."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = number
        if not self._quiet:
            sys.stderr.write("\nfinishing this step and saving; press again to end at once\n")

    def __call__(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None
