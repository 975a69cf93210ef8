"""Decoding in parallel by worker processes. Imports no torch.

Workers write finished rows directly into the file of pixels, so a decoder that crashes costs one picture. They are
processes because opening a small picture is mostly Python (two threads are slower than one), and they are started here
because multiprocessing would run the caller's script again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from crmatch.data.folder.decode import Facts, PictureError, Pixels, decode, decode_image
from crmatch.errors import DataError

_CHUNKS_PER_WORKER = 16
_LONGEST_CHUNK = 64
_COMMAND = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from crmatch.data.folder import workers; workers.work()"
Job = tuple[int, str]
"""Row of a picture in the file of pixels, and its path."""
Answers = list[tuple[int, Any]]
"""Row of a picture, and the values of its `Facts` or the reason why it cannot be read."""
Progress = Callable[[int, int], None]
"""Called with the number of finished pictures and the number of all pictures."""


def decode_pictures(
    paths: Sequence[Path | str], size: int, channels: int, progress: Progress | None = None
) -> tuple[Pixels, list[Facts | str]]:
    """Decode pictures in parallel: uint8 (N, size, size, channels), zeros if unreadable; and facts or reason per picture."""
    found: list[Facts | str] = [""] * len(paths)
    done = 0
    with tempfile.NamedTemporaryFile(prefix="crmatch-") as file:
        file.truncate(len(paths) * size * size * channels)
        for answers in decode_rows([(row, str(path)) for row, path in enumerate(paths)], Path(file.name), size, channels):
            for row, what in answers:
                found[row] = what if isinstance(what, str) else Facts(*what)
            done += len(answers)
            if progress:
                progress(done, len(paths))
        return np.fromfile(file.name, np.uint8).reshape(len(paths), size, size, channels), found


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_pictures(pictures: Sequence[Any], size: int, channels: int) -> Pixels:
    """PIL images, or paths of picture files, as uint8 (N, size, size, channels); a `DataError` if one cannot be read."""
    if not all(isinstance(picture, Image.Image | str | Path) for picture in pictures) or not pictures:
        raise DataError("these are no pictures.\nGive an array, a tensor, PIL images, or paths of picture files.")
    rows: list[Pixels | None] = [
        np.frombuffer(decode_image(ImageOps.exif_transpose(picture), size, channels)[0], np.uint8).reshape(size, size, channels)
        if isinstance(picture, Image.Image)
        else None
        for picture in pictures
    ]
    paths = [picture for picture in pictures if not isinstance(picture, Image.Image)]
    decoded, found = decode_pictures(paths, size, channels) if paths else (np.empty(0, np.uint8), [])
    broken = [f"{path}: {what}" for path, what in zip(paths, found, strict=True) if isinstance(what, str)]
    if broken:
        raise DataError(f"{len(broken)} of {len(paths)} pictures cannot be read: {broken[0]}.\nLeave them out.")
    rest = iter(decoded)
    return np.stack([next(rest) if row is None else row for row in rows])


def decode_rows(
    jobs: Sequence[Job], target: Path, size: int, channels: int, workers: int | None = None
) -> Generator[Answers, None, None]:
    """Decode pictures into rows of the file `target`; yields what was found, in any order."""
    count = max(1, min(workers or available_cores(), len(jobs) // 16))
    length = max(1, min(_LONGEST_CHUNK, len(jobs) // (_CHUNKS_PER_WORKER * count)))
    chunks = [jobs[start : start + length] for start in range(0, len(jobs), length)]
    pool = [_Worker([str(target), str(size), str(channels)]) for _ in range(count)]
    idle = queue.SimpleQueue[_Worker]()
    for worker in pool:
        idle.put(worker)

    def decode_chunk(chunk: Sequence[Job]) -> Answers:
        worker = idle.get()
        try:
            return worker.decode(chunk)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(count) as threads:  # each thread waits for one process
        try:
            for future in as_completed([threads.submit(decode_chunk, chunk) for chunk in chunks]):
                yield future.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in pool:
                worker.stop()


class _Worker:
    """A decoding process, started when it is needed: one line of JSON in, one line of JSON out."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._stopped = threading.Lock(), False

    def decode(self, chunk: Sequence[Job]) -> Answers:
        line = self._exchange(json.dumps(chunk).encode() + b"\n")
        if line.endswith(b"\n"):
            answers: Answers | str = json.loads(line)
            if isinstance(answers, str):
                advice = "Free some space, or choose another --data-dir."
                raise DataError(f"decoded pictures cannot be written: {answers}.\n{advice}")
            return answers
        self._end_process()
        if len(chunk) == 1:
            return [(chunk[0][0], "crashes the decoder")]
        return [answer for job in chunk for answer in self.decode([job])]  # one of them crashes the decoder: find it

    def stop(self) -> None:
        self._stopped = True
        self._end_process()

    def _exchange(self, request: bytes) -> bytes:
        """Send a line and read the answer, which is incomplete if the process has died or was stopped."""
        with self._lock:
            if self._stopped:
                return b""
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _COMMAND, json.dumps(sys.path), *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C goes to the parent only, which then stops its workers
                )
                assert self._process.stdout
                if not self._process.stdout.readline():  # the first line says that the decoder is ready
                    raise DataError(
                        f"the picture decoder does not start (exit code {self._process.wait()}).\n"
                        "Check this installation: python -c 'import crmatch.data.folder.workers'"
                    )
            process = self._process
        assert process.stdin
        assert process.stdout
        with contextlib.suppress(BrokenPipeError):  # that the process has died is noticed when its answer is read
            process.stdin.write(request)
            process.stdin.flush()
        return process.stdout.readline()

    def _end_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process:
            process.kill()
            process.communicate()


def work() -> None:
    """Run a worker: decode what stdin names, write rows into the target file, report on stdout what was found."""
    target, size, channels = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    length, say = size * size * channels, functools.partial(print, flush=True)
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # `open_picture` has its own limit, and reads large JPEGs at a fraction of their size
    Image.init()
    with open(target, "r+b", buffering=0) as file:
        say("ready")
        for line in sys.stdin:
            answers: list[tuple[int, Facts | str]] = []
            for row, path in json.loads(line):
                try:
                    content, facts = decode(path, size, channels)
                    if os.pwrite(file.fileno(), content, row * length) < length:
                        raise OSError(0, "No space left on device")
                    answers.append((row, facts))
                except PictureError as reason:
                    answers.append((row, str(reason)))
                except OSError as error:
                    return say(json.dumps(error.strerror))
            say(json.dumps(answers))
