"""Atomic file writes: readers see the old file or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from crmatch.errors import DataError, RequestError

MOST_TEXT = 128 << 20
"""Bytes of the largest JSON file or curves that are read: a quarter of a million log points."""
TEMPORARY = re.compile(r"\.(?P<name>.+)\.\d+\.tmp")
"""Names of temporary files: that of the file to be written, and the number of the process."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file beside `path`, flushed to disk and renamed when the block ends; the old file is unchanged until then.

    The new file has the old one's permissions. A link is replaced, never followed: it could lead anywhere.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        old = path.stat() if path.exists() else None
        if old and not stat.S_ISREG(old.st_mode):  # a rename would destroy a device or a pipe
            raise RequestError(f"{path} exists and is not a regular file.\nName another file to write.")
        make_directory(path.parent)
        with open(temporary, "wb") as file:
            if old:
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_names(path.parent)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        advice = "An older file is unchanged; free some space or choose another --out or --data-dir."
        raise DataError(f"cannot write {path}: {reason}.\n{advice}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, if they are missing, so that a power failure does not remove them again."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        _sync_names(directory.parent)


def _sync_names(directory: Path) -> None:
    """New and renamed files in a directory survive a power failure only after this."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with replacing(path) as file:
        file.write(content)


def remove_leftovers(directory: Path, name: str | None = None) -> None:
    """Remove temporary files of killed processes in `directory`: of all files, or of `name`. The caller must hold its lock."""
    for path in list(directory.iterdir()) if directory.is_dir() else []:
        found = TEMPORARY.fullmatch(path.name)
        if found and name in (None, found["name"]):
            with contextlib.suppress(OSError):
                path.unlink()


def checksum(content: bytes) -> str:
    """A checksum of 16 hex digits."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON atomically."""
    write_file(path, (json.dumps(values, indent=1) + "\n").encode())


def read_file(path: Path, most: int | None = None) -> bytes:
    """The content of a file; an OSError if it has more than `most` bytes, or is a device or a pipe, which may never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if most is not None and path.stat().st_size > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB", str(path))
    return path.read_bytes()


def read_json(path: Path) -> Any:
    """Read a JSON file; raises `DataError` if it is missing or damaged."""
    try:
        return json.loads(read_file(path, MOST_TEXT))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON, {str(error).splitlines()[0]}"
        raise DataError(f"{path} cannot be read: {reason}.\nRestore it, or make it readable.") from error
