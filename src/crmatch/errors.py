"""Errors that a user can fix, with the exit code of each.

A message has at most two lines: what was asked and found, then what would work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CRMatchError(Exception):
    """An expected failure: the command prints its message without a traceback and exits with `exit_code`."""

    exit_code = 1


class RequestError(CRMatchError, ValueError):
    """A wrong request: an unknown name, key or value, or a directory that holds another run."""

    exit_code = 2


class DataError(CRMatchError, ValueError):
    """A problem of data or disk: unreadable or damaged files, wrong checksums, no space, no permission."""

    exit_code = 3


class ResumeError(CRMatchError, RuntimeError):
    """A run that cannot be resumed: it has no readable checkpoint, or its directory is in use."""

    exit_code = 4


class InUseError(ResumeError):
    """Another process uses the run's directory."""


class DivergedError(CRMatchError, RuntimeError):
    """A loss, gradient or weight became infinite or NaN."""

    exit_code = 5


class StoppedError(CRMatchError, RuntimeError):
    """Training was stopped by a signal and saved its state; the same command resumes it."""

    exit_code = 75


class LostProcessError(CRMatchError, RuntimeError):
    """Another process of the run ended or does not answer; the same command resumes from the last checkpoint."""

    exit_code = 75


def printable(text: str) -> str:
    """The text on one line without control characters, so that names from files cannot command a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


def unknown_name_error(kind: str, name: str, known: Iterable[str]) -> RequestError:
    """The error for an unknown name; it suggests the most similar known name and lists all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return RequestError(f"unknown {kind} {name!r}.\n{guess}Known: {', '.join(names)}")
