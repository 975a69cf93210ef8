"""Picture files in, uint8 pixels out: decoded in parallel, broken ones named. Imports no torch.

A picture may be broken or hostile; then it is named with a reason, and nothing else happens. So pictures are read by worker
processes, which write finished rows straight into the file of pixels: a decoder that crashes costs one picture. Processes
rather than threads, because opening a small picture is mostly Python (two threads are slower than one); started here
rather than by multiprocessing, which would run the caller's script again.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from crmatch.data.images import covering_size, square
from crmatch.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
MOST_PIXELS = 50_000_000
MOST_BYTES = 1 << 29
SMALLEST_SIDE = 8
LARGEST_CHOSEN_SIDE = 512
HEADERS = 1000
DECODER = 1
"""Part of every cache's name; raise it when the pixels of any picture change."""
_LONGEST_CHUNK = 256
_CHUNK_SECONDS = 0.1
_ORIENTATION = 0x0112
_EXIF = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}
_TURN = Image.Transpose
_TURNS = (None, None, _TURN.FLIP_LEFT_RIGHT, _TURN.ROTATE_180, _TURN.FLIP_TOP_BOTTOM, _TURN.TRANSPOSE, _TURN.ROTATE_270,
          _TURN.TRANSVERSE, _TURN.ROTATE_90)  # fmt: skip
"""What makes a picture upright, by EXIF orientation."""
Pixels = NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Called with the number of pictures done and of pictures in all."""


class Facts(NamedTuple):
    """What a readable picture is: its upright size, whether it is stored as gray, and a hash of its decoded pixels."""

    width: int
    height: int
    gray: bool
    digest: int


FACTS = np.dtype([("width", np.int32), ("height", np.int32), ("gray", np.bool_), ("digest", np.uint64)])
"""Many `Facts` as one array."""


class PictureError(DataError):
    """A picture that cannot be used; the message is the short reason."""


def decode_picture(path: Path | str, size: int, channels: int) -> Pixels:
    """One picture as uint8 (size, size, channels).

    The first frame, upright by its EXIF orientation, transparency on white, 16-bit gray by its high byte, then resized and
    center-cropped like `crmatch.data.images.resize`.

    Raises:
        PictureError: the picture is broken, too large, or of another format.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content, _ = _decode(str(path), size, channels)
    return np.frombuffer(bytearray(content), np.uint8).reshape(size, size, channels)


def decode_pictures(
    paths: Sequence[Path | str],
    size: int,
    channels: int,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Pixels, list[Facts | str]]:
    """Many pictures, in parallel: uint8 (N, size, size, channels), zeros where broken; per picture its facts or the reason."""
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


def choose_size(paths: Sequence[Path | str]) -> tuple[int, int]:
    """(image size, channels) that suit the pictures, from the headers of at most 1,000 of them, evenly spaced.

    The size is the median shorter side within 8..512. The channels are a first guess: 1 where every header says gray.
    """
    sides, gray = [], True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in paths[:: max(1, -(-len(paths) // HEADERS))]:
            with contextlib.suppress(Exception), _open(str(path)) as picture:
                sides.append(min(picture.size))
                gray = gray and _is_gray(picture)
    side = int(np.median(sides)) if sides else SMALLEST_SIDE
    return min(max(side, SMALLEST_SIDE), LARGEST_CHOSEN_SIDE), 1 if gray else 3


def _open(path: str) -> Image.Image:
    """The picture with its header read and checked, not yet decoded."""
    length = os.stat(path).st_size
    if not 0 < length <= MOST_BYTES:
        raise PictureError(f"larger than {MOST_BYTES >> 20} MiB" if length else "empty file")
    picture = Image.open(path, formats=FORMATS)
    if picture.width * picture.height > MOST_PIXELS:
        picture.close()
        raise Image.DecompressionBombError
    return picture


def _decode(path: str, size: int, channels: int) -> tuple[bytes, Facts]:
    try:
        with _open(path) as file:
            file.load()
            picture = _upright(file)
            width, height = picture.size
            gray = _is_gray(picture)
            flat, mode = _flat(picture), "L" if channels == 1 else "RGB"
            content = _square(flat if flat.mode == mode else flat.convert(mode), size).tobytes()
    except PictureError:
        raise
    except Exception as error:  # Pillow's readers raise anything on hostile files
        raise PictureError(_reason(error)) from error
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return content, Facts(width, height, gray, int.from_bytes(digest))


def _reason(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    if isinstance(error, UnidentifiedImageError):
        return "not a readable JPEG, PNG, WebP, BMP, TIFF or GIF picture"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than {MOST_PIXELS // 1_000_000} million pixels"
    if "truncated" in text.lower() or isinstance(error, EOFError):
        return "truncated"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"damaged ({text[:80] or type(error).__name__})"


def _upright(picture: Image.Image) -> Image.Image:
    try:
        as_stored = _EXIF.isdisjoint(picture.info)  # TIFF has been turned while it was loaded
        turn = None if as_stored else _TURNS[picture.getexif().get(_ORIENTATION, 1)]
    except Exception:  # noqa: BLE001 - damaged EXIF says nothing about the pixels
        turn = None
    return picture if turn is None else picture.transpose(turn)


def _is_gray(picture: Image.Image) -> bool:
    """Whether the picture is stored as gray, by its mode or by a palette of grays."""
    if picture.mode in ("P", "PA"):
        colors = picture.getpalette("RGB") or []
        return colors[0::3] == colors[1::3] == colors[2::3]
    return picture.mode in ("1", "L", "LA", "La", "F") or picture.mode.startswith("I")


def _flat(picture: Image.Image) -> Image.Image:
    """Eight bits, nothing transparent: what shines through is white.

    16-bit gray keeps its high byte, as Pillow does for 16-bit color. 32-bit integers and floats have no fixed white, so
    each such picture is spread over its own range.
    """
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        values = np.nan_to_num(np.asarray(picture, np.float32), posinf=0, neginf=0)
        low, high = float(values.min()), float(values.max())
        return Image.fromarray(np.rint((values - low) * (255 / ((high - low) or 1))).astype(np.uint8))
    if not picture.has_transparency_data:
        return picture
    opaque = Image.new("RGBA", picture.size, "white")
    opaque.alpha_composite(picture.convert("RGBA"))
    return opaque.convert("RGB")


def _square(picture: Image.Image, size: int) -> Image.Image:
    """`square`, but for pictures so long and narrow that the resized one would be too large."""
    width, height = covering_size(*picture.size, size)
    if picture.size != (size, size) and width * height > MOST_PIXELS:
        raise PictureError(f"too long and narrow ({picture.size[0]}x{picture.size[1]})")
    return square(picture, size)


def decode_rows(
    jobs: Sequence[tuple[int, str]], target: Path, size: int, channels: int, workers: int | None = None
) -> Generator[list[tuple[int, Any]], None, None]:
    """Decode (row, path) pairs into rows of the file `target`; yields (row, values of its `Facts` or reason), in any order."""
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
                dead = answers is None
                if answers is None and len(worker.chunk) > 1:
                    suspects.extend(worker.chunk)  # once more, one by one, to find the culprit
                elif answers is None:
                    answers = [(row, "crashes the decoder") for row, _ in worker.chunk]
                if answers:
                    yield answers
                if dead or not (waiting or suspects):
                    selector.unregister(worker.output)
                    worker.stop()
                    if waiting or suspects:
                        start()
                elif suspects:
                    worker.send([suspects.popleft()])
                else:
                    worker.send([waiting.popleft() for _ in range(min(worker.pace, len(waiting)))])


class _Worker:
    """A decoding process: one line of JSON in, one line of JSON out; an empty first answer says that it is ready."""

    def __init__(self, target: Path, size: int, channels: int) -> None:
        code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from crmatch.data.folder import decode; decode.work()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path), str(target), str(size), str(channels)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.chunk: list[tuple[int, str]] = []
        self.pace = 4
        """How many pictures to send at once: as many as take about a tenth of a second."""

    def send(self, chunk: list[tuple[int, str]]) -> None:
        self.chunk, self._sent = chunk, time.perf_counter()
        with contextlib.suppress(BrokenPipeError):  # a dead process shows when its answer is read
            self.input.write(json.dumps(chunk).encode() + b"\n")
            self.input.flush()

    def receive(self) -> list[tuple[int, Any]] | None:
        """What was found in the last chunk; None where the process died over it."""
        line = self.output.readline()
        if not line and not self.chunk:
            raise DataError(
                f"the picture decoder does not start (exit code {self.process.wait()}).\n"
                "Check this installation: python -c 'import crmatch.data.folder.decode'"
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
    """The worker's side: decode what stdin names, write rows into the target, say on stdout what was found."""
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
                    content, facts = _decode(path, size, channels)
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
