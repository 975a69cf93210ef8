"""Downloads over bad connections: mirrors, resume, retries, checksums, locks. All servers are on the loopback interface."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from official_archives import QUICK, RecordedProgress, Server, cifar10, entry, source_file, stl10

from crmatch.data.official.download import Patience, download, locked
from crmatch.data.official.fetch import check, fetch
from crmatch.errors import DataError

CONTENT = np.random.default_rng(0).bytes(300_000)


def get(server: Server, folder: Path, *manners: str, progress: Any = None, patience: Patience = QUICK, **changes: Any) -> Path:
    """Download CONTENT from mirrors with these manners."""
    urls = [server.serve({"file": CONTENT}, manner, f"/{number}")["file"][0] for number, manner in enumerate(manners)]
    return download(source_file("file", CONTENT, *urls)._replace(**changes), folder / "file", progress, patience)


def left(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} - {".file.lock"}


def test_a_file_arrives_complete_and_is_not_requested_again(tmp_path: Path, server: Server) -> None:
    progress = RecordedProgress()
    assert get(server, tmp_path, "good", progress=progress).read_bytes() == CONTENT
    assert left(tmp_path) == {"file"}
    assert progress.starts == [(len(CONTENT), 0, "file"), (len(CONTENT), 0, "verifying file.part")]
    assert progress.bytes == [len(CONTENT)] * 2
    get(server, tmp_path, "good")
    assert len(server.requests) == 1


@pytest.mark.parametrize(("manner", "requests", "sent"), [("drop", 2, 1.0), ("drop often", 10, 1.0), ("no range", 2, 1.5)])
def test_any_number_of_drops_is_survived_while_there_is_progress(
    tmp_path: Path, server: Server, manner: str, requests: int, sent: float
) -> None:
    """A server that honors the range sends every byte once; one that ignores it starts over."""
    progress = RecordedProgress()
    assert get(server, tmp_path, manner, progress=progress).read_bytes() == CONTENT
    assert len(server.requests) == requests
    assert server.sent == sent * len(CONTENT)
    if manner == "drop":
        assert server.requests == [("/0/file", None), ("/0/file", "bytes=150000-")]
        assert progress.starts[1] == (len(CONTENT), 150_000, "file")


def test_what_arrived_is_kept_for_the_next_call(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match=r"after 150,000 of 300,000 bytes\.\nRun the command again"):
        get(server, tmp_path, "drop", patience=QUICK._replace(failures=1))
    assert left(tmp_path) == {"file.part"}
    assert get(server, tmp_path, "good").read_bytes() == CONTENT
    assert server.sent == len(CONTENT)


@pytest.mark.parametrize("after", [0, 100_000])
def test_an_interrupt_keeps_what_arrived(tmp_path: Path, server: Server, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        get(server, tmp_path, "good", progress=RecordedProgress(interrupt_after=after))
    kept = (tmp_path / "file.part").stat().st_size
    assert kept > after
    assert get(server, tmp_path, "good").read_bytes() == CONTENT
    assert server.requests[1:] == ([("/0/file", f"bytes={kept}-")] if kept < len(CONTENT) else [])


@pytest.mark.parametrize(("manner", "digest"), [("wrong", "md5"), ("good", "sha256")])
def test_a_file_with_a_wrong_checksum_is_deleted(tmp_path: Path, server: Server, manner: str, digest: str) -> None:
    changes = {"sha256": "0" * 64} if digest == "sha256" else {}
    with pytest.raises(DataError, match=rf"has {digest} \w+, not \w+; it was deleted\.\nTry again") as failure:
        get(server, tmp_path, manner, **changes)
    assert len(str(failure.value).splitlines()) == 2
    assert left(tmp_path) == set()


@pytest.mark.parametrize("first", ["404", "wrong", "longer", "hang", "always drop", "redirect"])
def test_the_next_mirror_is_used(tmp_path: Path, server: Server, first: str) -> None:
    assert get(server, tmp_path, first, "good").read_bytes() == CONTENT
    assert left(tmp_path) == {"file"}


def test_a_missing_file_is_requested_once_and_a_busy_server_again(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match=r"127\.0\.0\.1 answers 404 Not Found"):
        get(server, tmp_path, "404")
    assert len(server.requests) == 1
    assert get(server, tmp_path, "busy").read_bytes() == CONTENT


def test_a_silent_server_is_left_after_the_timeout(tmp_path: Path, server: Server) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match=r"timed out\.\nRun the command again to resume"):
        get(server, tmp_path, "hang", patience=QUICK._replace(timeout=0.1, failures=2))
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("manner", "message"),
    [
        ("wrong part", "offers 'bytes 150001-"),
        ("endless", "sends more than 300,000 bytes"),
        ("longer", "offers '300004' instead of '300000'"),
        ("redirect", "cannot download file"),  # to file:///etc/passwd
    ],
)
def test_a_server_with_another_file_is_refused(tmp_path: Path, server: Server, manner: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        get(server, tmp_path, manner)
    assert left(tmp_path) <= {"file.part"}


@pytest.mark.parametrize("beginning", [b"something else", CONTENT[:1000], CONTENT + b"more", CONTENT])
def test_whatever_is_in_the_part_the_file_becomes_right(tmp_path: Path, server: Server, beginning: bytes) -> None:
    (tmp_path / "file.part").write_bytes(beginning)
    assert get(server, tmp_path, "good").read_bytes() == CONTENT
    assert left(tmp_path) == {"file"}


def test_a_damaged_file_is_replaced(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").write_bytes(CONTENT[:-1] + b"?")
    assert get(server, tmp_path, "good").read_bytes() == CONTENT


def test_too_little_space_is_reported_before_the_download(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cifar10()
    catalog = {"cifar10": entry("cifar10", made.files, server.serve(made.files))}
    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("usage", "total used free")(1, 1, 10_000))
    with pytest.raises(DataError, match=r"GB free, but 0\.07 GB are needed\.\nFree some space, or choose another --data-dir"):
        fetch("cifar10", tmp_path, catalog=catalog, patience=QUICK)
    assert not server.requests
    with pytest.raises(DataError, match="GB free"):
        get(server, tmp_path, "good")
    assert not (tmp_path / "file.part").exists()


def test_a_full_disk_is_a_data_error(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match=r"cannot write .*file: No space left on device\.\nFree some space"):
        get(server, tmp_path, "good")
    monkeypatch.undo()
    assert get(server, tmp_path, "good").read_bytes() == CONTENT
    assert len(server.requests) == 1


def test_a_lock_is_waited_for_with_a_message_but_not_forever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holder = FileLock(tmp_path / ".file.lock", thread_local=False)
    holder.acquire()
    with pytest.raises(DataError, match=r"in use by another process\.\nWait until it ends"), locked(tmp_path / "file", 0.1):
        pass
    threading.Timer(0.2, holder.release).start()
    with caplog.at_level(logging.WARNING), locked(tmp_path / "file", 5):
        assert not holder.is_locked
    assert "another process is working on" in caplog.text


def test_two_fetches_at_once_download_once(tmp_path: Path, server: Server) -> None:
    made = stl10()
    catalog = {"stl10": entry("stl10", made.files, server.serve(made.files))}
    results: list[Any] = []

    def work() -> None:
        results.append(fetch("stl10", tmp_path, catalog=catalog, patience=QUICK._replace(lock=20)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "stl10.npz"] * 3
    assert server.sent == sum(map(len, made.files.values()))


@pytest.mark.parametrize("after", [0, 60_000, 300_000, 500_000, 650_000, 850_000])
def test_a_fetch_interrupted_anywhere_is_completed_by_the_next(tmp_path: Path, server: Server, after: int) -> None:
    """Ctrl-C during download, verification, conversion and the hashing of the result."""
    made = cifar10()
    catalog = {"cifar10": entry("cifar10", made.files, server.serve(made.files))}
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", tmp_path, catalog=catalog, patience=QUICK, progress=RecordedProgress(after))
    assert not list(tmp_path.glob(".*.tmp"))
    (tmp_path / ".cifar10.npz.999999.tmp").write_bytes(b"left by a killed process")
    fetch("cifar10", tmp_path, catalog=catalog, patience=QUICK)
    assert not check("cifar10", tmp_path, catalog).problems
    assert all(wanted for _, wanted in server.requests[1:])  # never from the start again
