"""Downloads with mirrors, resume, retries and a lock. A file appears only after its size and checksums were verified."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from crmatch.data.official.catalog import SourceFile
from crmatch.data.packed import CHUNK, Progress, require_space, start_progress
from crmatch.errors import DataError

logger = logging.getLogger(__name__)


class Patience(NamedTuple):
    """How long, in seconds, and how often a download tries."""

    timeout: float = 30  # of reading from the socket
    failures: int = 5  # consecutive attempts without progress before the next mirror is tried
    pause: float = 1  # before the second attempt; doubles with each failure
    lock: float = 3600  # for another process that works on the same file


PATIENCE = Patience()


class _RetryError(Exception):
    """The connection failed; another attempt may succeed."""


class _MirrorError(Exception):
    """This mirror does not have the file."""


def download(source: SourceFile, destination: Path, progress: Progress | None = None, patience: Patience = PATIENCE) -> Path:
    """Download a file from the first mirror that has it.

    The content is kept in `<destination>.part` until its checksums are right; any later call resumes there.

    Raises:
        DataError: no mirror served the right file, the disk is full, or another process holds the lock too long.
    """
    part = destination.with_name(f"{destination.name}.part")
    problem = "no mirror is known"
    with locked(destination, patience.lock):
        try:
            if destination.exists() and verify(destination, source, progress) is None:
                return destination
            for url in source.urls:
                try:
                    _receive_all(url, part, source, progress, patience)
                    os.replace(part, destination)
                    return destination
                except (_MirrorError, _RetryError) as error:
                    problem = f"{urlsplit(url).hostname} {error}"
                    logger.warning("%s: %s", destination.name, problem)
            if not _size(part):
                part.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(destination, error) from error
    retry = "Run the command again to resume" if part.exists() else "Try again later"
    raise DataError(f"cannot download {destination.name}: {problem}.\n{retry}, or give a copy of the file with --from FILE.")


def verify(path: Path, source: SourceFile, progress: Progress | None = None) -> str | None:
    """What is wrong with a file, as the end of a sentence; None if size and checksums are right."""
    if _size(path) != source.size:
        return f"has {_size(path):,} bytes, not {source.size:,}"
    for name, digest in digests(path, source.checksums, progress).items():
        if digest != source.checksums[name]:
            return f"has {name} {digest}, not {source.checksums[name]}"
    return None


def digests(path: Path, algorithms: Iterable[str], progress: Progress | None = None) -> dict[str, str]:
    """Hexadecimal digests of a file by algorithm."""
    hashes = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}
    advance = start_progress(progress, _size(path), 0, f"verifying {path.name}")
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            for value in hashes.values():
                value.update(chunk)
            advance(len(chunk))
    return {name: value.hexdigest() for name, value in hashes.items()}


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock that belongs to `path`; wait up to `seconds` for another process, with a message."""
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            logger.warning("another process is working on %s: waiting for it", path)
            held = lock.acquire(timeout=seconds)
    except Timeout as error:
        raise DataError(f"{path} is in use by another process.\nWait until it ends, then run the command again.") from error
    except OSError as error:
        raise _cannot_write(path, error) from error
    with held:
        yield


def _cannot_write(path: Path, error: OSError) -> DataError:
    reason = error.strerror or type(error).__name__
    return DataError(f"cannot write {path}: {reason}.\nFree some space, or choose a --data-dir you may write to.")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive_all(url: str, part: Path, source: SourceFile, progress: Progress | None, patience: Patience) -> None:
    """Complete `part` from one mirror, with several connections if each of them brings progress, and verify it."""
    resumed, failures, best = part.exists(), 0, _size(part)
    step = min(1 << 20, source.size // 20)  # less than this is no progress
    while True:
        try:
            _receive(url, part, source.size, progress, patience.timeout)
        except _RetryError as error:
            failures += 1
            if _size(part) >= best + step:
                failures, best = 1, _size(part)
            if failures >= patience.failures:
                raise
            logger.info("%s: %s; trying again", url, error)
            time.sleep(min(60.0, patience.pause * 2 ** (failures - 1)))
            continue
        if (mismatch := verify(part, source, progress)) is None:
            return
        part.unlink()
        if not resumed:
            raise _MirrorError(f"sent a file that {mismatch}; it was deleted")
        resumed = False  # the beginning may have come from elsewhere: try once more, from the start


def _receive(url: str, part: Path, size: int, progress: Progress | None, timeout: float) -> None:
    """Append what one connection sends to `part`, unless it is complete."""
    if (have := _size(part)) == size:
        return
    have = have if have < size else 0
    headers = {"User-Agent": "crmatch", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with _network_errors():  # urllib follows no redirect to file://
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    with response:
        # Status 206: the server sends the requested rest. Otherwise it ignored the range and sends the whole file.
        position = have if response.status == 206 else 0
        offered = response.headers.get("Content-Range" if position else "Content-Length")
        expected = f"bytes {position}-{size - 1}/{size}" if position else str(size)
        if offered not in (expected, None):
            raise _MirrorError(f"offers {offered!r} instead of {expected!r}")
        require_space(part.parent, size - position)
        advance = start_progress(progress, size, position, part.stem)
        with open(part, "ab" if position else "wb") as file:
            while position <= size:
                with _network_errors():  # not around `write`: errors of the disk are not those of the network
                    chunk = response.read1(CHUNK)
                if not chunk:
                    break
                file.write(chunk)
                position += len(chunk)
                advance(len(chunk))
    if position > size:
        part.unlink()
        raise _MirrorError(f"sends more than {size:,} bytes")
    if position < size:
        raise _RetryError(f"closed the connection after {position:,} of {size:,} bytes")


@contextlib.contextmanager
def _network_errors() -> Iterator[None]:
    """Turn exceptions of a connection into `_RetryError` or `_MirrorError`."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        final = 400 <= error.code < 500 and error.code not in (408, 425, 429)  # these three say: try again
        raise (_MirrorError if final else _RetryError)(f"answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", None) or error).partition("\n")[0] or type(error).__name__
        raise _RetryError(f"failed: {reason}") from error
