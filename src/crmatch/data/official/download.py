"""Official files brought here: mirrors, resume, retries, a lock; a file appears only when its checksum is right."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from crmatch.data.packed import CHUNK, Progress, cannot_write, require_space
from crmatch.errors import DataError

log = logging.getLogger(__name__)
LARGEST_DOWNLOAD = 1 << 36


class Patience(NamedTuple):
    """How long a download waits, in seconds, and how often it tries."""

    timeout: float = 30
    """Without a byte, until the connection counts as broken."""
    failures: int = 5
    """In a row and without a step forward (a megabyte, or a twentieth of a small file), until the next mirror is tried."""
    pause: float = 1
    """Before the second attempt; doubles with each failure."""
    lock: float = 3600
    """For another process that works on the same file."""


PATIENCE = Patience()


class _InterruptedError(Exception):
    """The network failed in a way that a new attempt may mend."""


class _RefusedError(Exception):
    """This mirror does not have the file."""


def download(
    urls: Iterable[str],
    destination: Path,
    *,
    size: int | None,
    checksums: Mapping[str, str],
    progress: Progress | None = None,
    patience: Patience = PATIENCE,
) -> Path:
    """Bring a file from the first mirror that has it; `destination` appears only with the right checksums.

    What arrives lies in `<destination>.part` until then, and any later call continues there.

    Args:
        urls: mirrors in order of preference, http or https.
        destination: the file to be; at once returned when it is there and right.
        size: its length in bytes, where known.
        checksums: algorithm (`md5`, `sha256`) to hexadecimal digest; all must be right.
        progress: told about every attempt and about the verification.
        patience: timeouts and retries.

    Raises:
        DataError: no mirror served the right file, the disk is full, or another process holds the lock too long.
    """
    part = destination.with_name(f"{destination.name}.part")
    problem = "no mirror is known"
    with locked(destination, patience.lock):
        try:
            if destination.exists():
                if verify(destination, size, checksums, progress) is None:
                    return destination
                destination.unlink()
            continued = part.exists()
            mirrors = deque(urls)
            while mirrors:
                url = mirrors.popleft()
                try:
                    _receive_all(url, part, size, progress, patience)
                except (_RefusedError, _InterruptedError) as error:
                    problem = f"{urlsplit(url).hostname} {error}"
                else:
                    mismatch = verify(part, size, checksums, progress)
                    if mismatch is None:
                        os.replace(part, destination)
                        return destination
                    part.unlink()
                    problem = f"what {urlsplit(url).hostname} sent {mismatch} and was deleted"
                    if continued:  # the beginning may have come from elsewhere: once more, from the start
                        mirrors.appendleft(url)
                        continued = False
                log.warning("%s: %s", destination.name, problem)
        except OSError as error:
            raise cannot_write(destination, error) from error
    if part.exists() and not part.stat().st_size:
        part.unlink()
    kept = "Run the command again to continue" if part.exists() else "Try again later"
    raise DataError(f"cannot download {destination.name}: {problem}.\n{kept}, or give a copy of the file with --from FILE.")


def verify(path: Path, size: int | None, checksums: Mapping[str, str], progress: Progress | None = None) -> str | None:
    """What is wrong with a file, as the end of a sentence; None if nothing is."""
    found = path.stat().st_size
    if size is not None and found != size:
        return f"has {found:,} bytes, not {size:,}"
    for name, digest in digests(path, checksums, progress).items():
        if digest != checksums[name]:
            return f"has {name} {digest}, not {checksums[name]}"
    return None


def digests(path: Path, algorithms: Iterable[str], progress: Progress | None = None) -> dict[str, str]:
    """Hexadecimal digests of a file by algorithm, from one reading."""
    hashes = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}
    if progress:
        progress.start(path.stat().st_size, 0, f"verifying {path.name}")
    try:
        with open(path, "rb") as file:
            while piece := file.read(CHUNK):
                for value in hashes.values():
                    value.update(piece)
                if progress:
                    progress.advance(len(piece))
    finally:
        if progress:
            progress.stop()
    return {name: value.hexdigest() for name, value in hashes.items()}


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock that belongs to `path`; wait up to `seconds` for another process, and say so."""
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.warning("another process is working on %s: waiting for it", path)
            lock.acquire(timeout=seconds)
    except Timeout as error:
        raise DataError(f"{path} is in use by another process.\nWait until it ends, then run the command again.") from error
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        yield
    finally:
        lock.release()


def _receive_all(url: str, part: Path, size: int | None, progress: Progress | None, patience: Patience) -> None:
    """Fill `part` from one mirror, over as many connections as it takes while they bring it forward."""
    step = 1 << 20 if size is None else max(1, min(1 << 20, size // 20))
    goal, failures = (part.stat().st_size if part.exists() else 0) + step, 0
    while True:
        have = part.stat().st_size if part.exists() else 0
        if size is not None and have > size:
            part.unlink()
            have = 0
        if have == size:
            return
        try:
            return _receive(url, part, have, size, progress, patience.timeout)
        except _InterruptedError as error:
            reached = part.stat().st_size if part.exists() else 0
            failures += 1
            if reached >= goal:
                goal, failures = reached + step, 1
            if failures >= patience.failures:
                raise
            log.info("%s: %s; trying again", url, error)
            time.sleep(min(60.0, patience.pause * 2 ** (failures - 1)))


def _receive(url: str, part: Path, have: int, size: int | None, progress: Progress | None, timeout: float) -> None:
    headers = {"User-Agent": "crmatch", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with _network(part):
        response = _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout)
    with response:
        position, total = _offered(response, have)
        if None not in (size, total) and total != size:
            raise _RefusedError(f"offers {total:,} bytes, not {size:,}")
        end = total if size is None else size
        require_space(part.parent, (end or position) - position)
        if progress:
            progress.start(end, position, part.stem)
        try:
            with open(part, "ab" if position else "wb") as file:
                while True:
                    with _network():
                        piece = response.read1(CHUNK)
                    if not piece:
                        break
                    position += len(piece)
                    if position > (LARGEST_DOWNLOAD if end is None else end):
                        file.truncate(0)
                        raise _RefusedError("sends more than the file should have")
                    file.write(piece)
                    if progress:
                        progress.advance(len(piece))
                file.flush()
                os.fsync(file.fileno())
        finally:
            if progress:
                progress.stop()
    if end is not None and position < end:
        raise _InterruptedError(f"closed the connection after {position:,} of {end:,} bytes")


def _offered(response: http.client.HTTPResponse, have: int) -> tuple[int, int | None]:
    """(position of the first byte that comes, length of the whole file) as the server says."""
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)", response.headers.get("Content-Range", ""))
        if not have or not found or int(found[1]) != have:
            raise _RefusedError("answers a request for the rest of the file with another part of it")
        return have, None if found[2] == "*" else int(found[2])
    if response.status != 200:
        raise _RefusedError(f"answers with status {response.status}")
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if re.fullmatch(r"\d{1,18}", length) else None


@contextlib.contextmanager
def _network(part: Path | None = None) -> Iterator[None]:
    """Turn what a connection can raise into "try again" or "not here"."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and part:  # what lies here does not fit what the server has
            part.unlink(missing_ok=True)
        elif 400 <= error.code < 500 and error.code not in (408, 425, 429):
            raise _RefusedError(f"answers {error.code} {error.reason}") from error
        raise _InterruptedError(f"answers {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", None) or error).partition("\n")[0] or type(error).__name__
        raise _InterruptedError(f"failed: {reason}") from error


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS only, also after a redirect; the standard opener would read file:// and ftp:// too."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler, urllib.request.HTTPHandler, urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler, urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):  # fmt: skip
        opener.add_handler(handler())
    return opener
