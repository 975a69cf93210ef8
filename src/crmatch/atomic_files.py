"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crmatch.errors import DataError


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: beside it, to disk, renamed; a full disk leaves what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = error.strerror or type(error).__name__
        advice = "What was there before is unchanged; choose another --out or free some space."
        raise DataError(f"cannot write {path}: {reason}.\n{advice}") from error


def remove_leftovers(directory: Path) -> None:
    """Remove what killed writers left in and below `directory`; the caller holds its lock, so nobody is writing."""
    for temporary in directory.rglob(".*.tmp"):
        with contextlib.suppress(OSError):
            temporary.unlink()


def checksum(content: bytes) -> str:
    """16 hex digits that change when any byte does."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    write_file(path, (json.dumps(values, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """Values of a JSON file; raises `DataError` where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON, {str(error).splitlines()[0]}"
        raise DataError(f"{path} cannot be read: {reason}.\nThe file is missing or damaged; bring it back.") from error
