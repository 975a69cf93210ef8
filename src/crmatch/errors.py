"""What can go wrong in ways a user can mend, with the exit code of each.

A message has at most two lines: what was asked and found, then what would work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CRMatchError(Exception):
    """An expected failure: the command prints its message without a traceback and exits with `exit_code`."""

    exit_code = 1


class RequestError(CRMatchError, ValueError):
    """A wrong request: unknown name, key or value; another spec in that directory."""

    exit_code = 2


class DataError(CRMatchError, ValueError):
    """Data or disk: unreadable or broken data, no space, no permission, checksum."""

    exit_code = 3


class ResumeError(CRMatchError, RuntimeError):
    """A run that cannot be resumed: no readable checkpoint, or a directory in use."""

    exit_code = 4


class InUseError(ResumeError):
    """Another process has the run's directory."""


class DivergedError(CRMatchError, RuntimeError):
    """Training left the finite numbers."""

    exit_code = 5


class StoppedError(CRMatchError, RuntimeError):
    """Stopped by a signal after the state was saved; the same command continues."""

    exit_code = 75


class LostProcessError(CRMatchError, RuntimeError):
    """Another process of the run ended, or does not answer; the same command continues from the last checkpoint."""

    exit_code = 75


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> RequestError:
    """The error for an unknown name, with the nearest known one and the whole list."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return RequestError(f"unknown {kind} {name!r}.\n{guess}Known: {', '.join(names)}")
