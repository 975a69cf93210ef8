"""Decoding in parallel by worker processes. Imports no torch.

Workers write finished rows directly into the file of pixels, so a decoder that crashes costs one picture. They are
processes rather than threads because opening a small picture is mostly Python (two threads are slower than one), and they
are started here rather than by multiprocessing because that would run the caller's script again.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from crmatch.data.folder.decode import Facts, PictureError, Pixels, decode
from crmatch.errors import DataError

_CHUNK_SECONDS = 0.1
_LONGEST_CHUNK = 256
_COMMAND = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from crmatch.data.folder import workers; workers.work()"
Progress = Callable[[int, int], None]
"""Called with the number of finished pictures and the number of all pictures."""


def decode_pictures(
    paths: Sequence[Path | str],
    size: int,
    channels: int,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Pixels, list[Facts | str]]:
    """Decode pictures in parallel: uint8 (N, size, size, channels), zeros if unreadable; and facts or reason per picture."""
    found: list[Facts | str] = [""] * len(paths)
    with tempfile.NamedTemporaryFile(prefix="crmatch-") as file:
        file.truncate(len(paths) * size * size * channels)
        jobs, done = [(row, str(path)) for row, path in enumerate(paths)], 0
        for answers in decode_rows(jobs, Path(file.name), size, channels, workers):
            for row, what in answers:
                found[row] = what if isinstance(what, str) else Facts(*what)
            done += len(answers)
            if progress:
                progress(done, len(paths))
        return np.fromfile(file.name, np.uint8).reshape(len(paths), size, size, channels), found


def decode_rows(
    jobs: Sequence[tuple[int, str]], target: Path, size: int, channels: int, workers: int | None = None
) -> Generator[list[tuple[int, Any]], None, None]:
    """Decode (row, path) pairs into rows of the file `target`.

    Yields lists of (row, values of its `Facts`, or the reason why it cannot be read), in any order.
    """
    workers = max(1, min(workers or len(os.sched_getaffinity(0)), len(jobs) // 16))
    waiting, suspects = deque(jobs), deque[tuple[int, str]]()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:

        def start() -> None:
            worker = _Worker(target, size, channels)
            stack.callback(worker.stop)
            selector.register(worker.output, selectors.EVENT_READ, worker)

        for _ in range(workers if waiting else 0):
            start()
        while selector.get_map():
            for key, _ in selector.select():
                worker: _Worker = key.data
                answers = worker.receive()
                died = answers is None
                if died and len(worker.chunk) > 1:
                    suspects.extend(worker.chunk)  # one of them crashed the decoder: try them one by one
                elif died:
                    answers = [(row, "crashes the decoder") for row, _ in worker.chunk]
                if answers:
                    yield answers
                if died or not (waiting or suspects):
                    selector.unregister(worker.output)
                    worker.stop()
                    if waiting or suspects:
                        start()
                elif suspects:
                    worker.send([suspects.popleft()])
                else:
                    worker.send([waiting.popleft() for _ in range(min(worker.pace, len(waiting)))])


class _Worker:
    """A decoding process: one line of JSON in, one line of JSON out. An empty first answer says that it is ready."""

    def __init__(self, target: Path, size: int, channels: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, json.dumps(sys.path), str(target), str(size), str(channels)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the parent only, which then stops its workers
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.chunk: list[tuple[int, str]] = []
        self.pace = 4  # number of pictures per chunk, adjusted so that a chunk takes about a tenth of a second

    def send(self, chunk: list[tuple[int, str]]) -> None:
        self.chunk, self._sent = chunk, time.perf_counter()
        with contextlib.suppress(BrokenPipeError):  # that the process has died is noticed when its answer is read
            self.input.write(json.dumps(chunk).encode() + b"\n")
            self.input.flush()

    def receive(self) -> list[tuple[int, Any]] | None:
        """The answers to the last chunk; None if the process died over it."""
        line = self.output.readline()
        if not line and not self.chunk:
            raise DataError(
                f"the picture decoder does not start (exit code {self.process.wait()}).\n"
                "Check this installation: python -c 'import crmatch.data.folder.workers'"
            )
        answer = json.loads(line) if line.endswith(b"\n") else None
        if isinstance(answer, str):
            raise DataError(f"decoded pictures cannot be written: {answer}.\nFree some space, or choose another --data-dir.")
        if self.chunk:
            slow = time.perf_counter() - self._sent > _CHUNK_SECONDS
            self.pace = max(1, self.pace // 2) if slow else min(2 * self.pace, _LONGEST_CHUNK)
        return answer

    def stop(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.input.close()
        self.output.close()
        self.process.wait()


def work() -> None:
    """Run a worker: decode what stdin names, write rows into the target file, report on stdout what was found."""
    target, size, channels = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

    def say(message: object) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    warnings.simplefilter("ignore")
    Image.init()
    length = size * size * channels
    with open(target, "r+b", buffering=0) as file:
        say([])
        for line in sys.stdin:
            answers: list[tuple[int, Facts | str]] = []
            for row, path in json.loads(line):
                try:
                    content, facts = decode(path, size, channels)
                except PictureError as reason:
                    answers.append((row, str(reason)))
                    continue
                try:
                    if os.pwrite(file.fileno(), content, row * length) < length:
                        raise OSError(0, "No space left on device")
                except OSError as error:
                    return say(error.strerror)
                answers.append((row, facts))
            say(answers)
