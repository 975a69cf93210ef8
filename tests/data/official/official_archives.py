"""Small archives in the official layouts, damaged zip files, and a loopback server that serves files well or badly.

Pixels are written value by value from the description of the layout, so that a reader is compared with an independent answer.
"""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from scipy.io import savemat

from crmatch.data.official.catalog import CATALOG, SourceFile, SourceSet
from crmatch.data.official.download import Patience

Array = np.ndarray[Any, Any]
QUICK = Patience(timeout=0.3, failures=3, pause=0.01, lock=0.3)
SMALL: dict[str, dict[str, int]] = {
    "cifar10": {"train": 50, "test": 20},
    "cifar100": {"train": 200, "test": 100},
    "svhn": {"train": 37, "test": 12},
    "stl10": {"train": 20, "test": 10, "unlabeled": 300, "fold": 4},
    "mini_imagenet": {"train": 15, "test": 6},
}
MINI_CLASSES = ("n01532829", "n01558993", "n01704323")


class Made(NamedTuple):
    """Official files by name, and the arrays that a reader must find in them, in the order of the packed set."""

    files: dict[str, bytes]
    truth: dict[str, Array]


def source_file(name: str, content: bytes, *urls: str) -> SourceFile:
    """A file of the catalog with the checksums of `content`."""
    md5, sha256 = hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest()
    return SourceFile(name, urls, len(content), md5, sha256)


def entry(name: str, files: Mapping[str, bytes], urls: Mapping[str, tuple[str, ...]] | None = None) -> SourceSet:
    """The catalog's entry with small counts and the checksums of these files."""
    sources = tuple(source_file(file, content, *(urls or {}).get(file, ())) for file, content in files.items())
    changes: dict[str, Any] = {"files": sources, "counts": SMALL[name]}
    if name == "mini_imagenet":
        changes |= {"classes": len(MINI_CLASSES), "files": ()}
    return CATALOG[name]._replace(**changes)


def tar(members: Mapping[str, bytes], folder: str, format: int) -> bytes:
    """A tar.gz that begins with a directory entry, as the official ones do."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=format, compresslevel=1) as archive:
        directory = tarfile.TarInfo(folder)
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for name, content in members.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def images_and_labels(random: np.random.Generator, count: int, side: int, classes: int) -> tuple[Array, Array]:
    return random.integers(0, 256, (count, side, side, 3), dtype=np.uint8), random.integers(0, classes, count)


def planes(image: Array, by_column: bool = False) -> bytes:
    """Red, green and blue plane of one image, row by row or column by column, written value by value."""
    return _planes(image.tobytes(), len(image), by_column)


@cache
def _planes(pixels: bytes, side: int, by_column: bool) -> bytes:
    if by_column:
        return bytes(pixels[3 * (side * y + x) + c] for c in range(3) for x in range(side) for y in range(side))
    return bytes(pixels[3 * (side * y + x) + c] for c in range(3) for y in range(side) for x in range(side))


def truth(train: tuple[Array, Array], test: tuple[Array, Array], names: list[str], **more: Array) -> dict[str, Array]:
    images = {"train_images": train[0], "train_labels": train[1], "test_images": test[0], "test_labels": test[1]}
    return {**images, **more, "class_names": np.array(names)}


@cache
def cifar(name: str) -> Made:
    random = np.random.default_rng(0)
    classes = int(name.removeprefix("cifar"))
    train, test = (images_and_labels(random, SMALL[name][part], 32, classes) for part in ("train", "test"))

    def records(images: Array, labels: Array) -> bytes:
        heads = [bytes([label // 5, label]) if classes == 100 else bytes([label]) for label in labels.tolist()]
        return b"".join(head + planes(image) for head, image in zip(heads, images, strict=True))

    names = [f"{name} {label}" for label in range(classes)]
    if classes == 100:
        coarse = "\n".join(f"coarse {k}" for k in range(20)).encode()
        members = {"train.bin": records(*train), "test.bin": records(*test), "coarse_label_names.txt": coarse}
        members["fine_label_names.txt"] = "\n".join(names).encode()
        return Made(
            {"cifar-100-binary.tar.gz": tar(members, "cifar-100-binary", tarfile.PAX_FORMAT)}, truth(train, test, names)
        )
    members = {f"data_batch_{k}.bin": records(*(part[10 * k - 10 : 10 * k] for part in train)) for k in range(1, 6)}
    members |= {"test_batch.bin": records(*test), "batches.meta.txt": ("\n".join(names) + "\n\n").encode(), "readme.html": b""}
    return Made({"cifar-10-binary.tar.gz": tar(members, "cifar-10-batches-bin", tarfile.GNU_FORMAT)}, truth(train, test, names))


def cifar10() -> Made:
    return cifar("cifar10")


@cache
def svhn(seed: int = 0) -> Made:
    random = np.random.default_rng(seed)
    files, data = {}, {}
    for part in ("train", "test"):
        data[part] = images_and_labels(random, SMALL["svhn"][part], 32, 10)
        images, digits = data[part]
        digits[:2] = 0, 1
        buffer = io.BytesIO()
        labels = np.array([[digit or 10] for digit in digits], np.uint8)
        savemat(buffer, {"X": np.stack(list(images), axis=3), "y": labels}, do_compression=True)
        files[f"{part}_32x32.mat"] = buffer.getvalue()
    return Made(files, truth(data["train"], data["test"], [str(k) for k in range(10)]))


@cache
def stl10() -> Made:
    random = np.random.default_rng(0)
    counts = SMALL["stl10"]
    train, test = (images_and_labels(random, counts[part], 96, 10) for part in ("train", "test"))
    unlabeled = np.repeat(random.integers(0, 256, (3, 96, 96, 3), dtype=np.uint8), counts["unlabeled"] // 3, axis=0)
    unlabeled[:, 0, 0, 0] = np.arange(counts["unlabeled"]) % 251
    third = counts["unlabeled"] // 3  # the images of a third differ in one value only: writing value by value is slow
    some = [planes(unlabeled[index], by_column=True) for index in (0, third, 2 * third)]
    blocks = [bytes([index % 251]) + some[index // third][1:] for index in range(counts["unlabeled"])]
    folds = np.stack([random.permutation(counts["train"])[: counts["fold"]] for _ in range(10)])
    names = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    members = {
        "test_X.bin": b"".join(planes(image, by_column=True) for image in test[0]),
        "test_y.bin": bytes(label + 1 for label in test[1].tolist()),
        "train_X.bin": b"".join(planes(image, by_column=True) for image in train[0]),
        "train_y.bin": bytes(label + 1 for label in train[1].tolist()),
        "unlabeled_X.bin": b"".join(blocks),
        "class_names.txt": ("\n".join(names) + "\n").encode(),
        "fold_indices.txt": b"".join((" ".join(map(str, fold)) + " \n").encode() for fold in folds.tolist()),
    }
    content = tar(members, "stl10_binary", tarfile.USTAR_FORMAT)
    return Made({"stl10_binary.tar.gz": content}, truth(train, test, names, unlabeled_images=unlabeled, folds=folds))


MAKERS = {"cifar10": cifar10, "cifar100": lambda: cifar("cifar100"), "svhn": svhn, "stl10": stl10}


@cache
def mini_pictures() -> dict[str, bytes]:
    """Seven pictures of three classes, named as in Ravi and Larochelle's lists."""
    random = np.random.default_rng(0)
    pictures = {}
    for name in MINI_CLASSES:
        for number in range(7):
            height, width = random.integers(90, 130, 2)
            buffer = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG", compress_level=1)
            pictures[f"{name}/{name}{number:08}.jpg"] = buffer.getvalue()
    return pictures


def mini_lists() -> dict[str, bytes]:
    lists = {}
    for list_name, label in zip(("train.csv", "val.csv", "test.csv"), MINI_CLASSES, strict=True):
        rows = [f"{label}{number:08}.jpg,{label}" for number in (3, 1, 0, 2, 6, 5, 4)]
        lists[list_name] = ("\n".join(["filename,label", *rows]) + "\n").encode()
    return lists


def zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


@cache
def bad_zips() -> dict[str, bytes]:
    """Zip files for mini-ImageNet that must be refused, by the kind of damage."""
    from picture_corpus import png

    pictures = mini_pictures()
    first = next(iter(pictures))
    good, mebibyte = zipped(pictures), b"\0" * (1 << 20)
    size, huge, tiny = (struct.pack("<I", value) for value in (1 << 20, 1 << 30, 1))
    lists = mini_lists()
    return {
        "absolute name": zipped(pictures | {"/tmp/evil": b"x"}),
        "parent name": zipped(pictures | {"../../outside/evil": b"x"}),
        "hidden parent name": zipped(pictures | {"a/../../../outside/evil": b"x"}),
        "backslashes": zipped(pictures | {"..\\outside\\evil": b"x"}),
        "bomb": zipped(pictures | {first: mebibyte}).replace(size, huge),
        "lying size": zipped(pictures | {first: mebibyte}).replace(size, tiny),
        "broken picture": zipped(pictures | {first: pictures[first][:-100]}),
        "huge picture": zipped(pictures | {first: png(30_000, 30_000, 8, 2, b"")}),
        "missing picture": zipped({name: content for name, content in pictures.items() if name != first}),
        "duplicate": good.replace(b"/n0153282900000001", b"/n0153282900000002"),
        "wrong columns": zipped(pictures | lists | {"val.csv": b"a,b\nc,d\n"}),
        "list names another file": zipped(pictures | lists | {"val.csv": b"filename,label\n../../outside/evil,a\n"}),
        "list is not text": zipped(pictures | lists | {"val.csv": b"\xff" * 50}),
        "two lists": zipped(pictures | {name: lists[name] for name in ("train.csv", "val.csv")}),
        "truncated": good[: len(good) // 2],
        "not a zip file": b"<html>404</html>",
        "empty": b"",
    }


class RecordedProgress:
    """A progress that records what it is told, and can press Ctrl-C."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.starts: list[tuple[int | None, int, str]] = []
        self.bytes: list[int] = []
        self._left = interrupt_after

    def start(self, total: int | None, already: int, label: str) -> None:
        self.starts.append((total, already, label))
        self.bytes.append(0)

    def advance(self, count: int) -> None:
        self.bytes[-1] += count
        if self._left is not None:
            self._left -= count
            if self._left < 0:
                raise KeyboardInterrupt


@dataclass
class Server:
    """A loopback server: path -> content, and how it misbehaves."""

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    manners: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Range header) of every request."""
    sent: int = 0
    """Bytes of content that were sent."""
    stopping: threading.Event = field(default_factory=threading.Event)

    def serve(self, files: Mapping[str, bytes], manner: str = "good", folder: str = "") -> dict[str, tuple[str, ...]]:
        """Offer these files with one manner; returns their addresses."""
        paths = {name: f"{folder}/{name}" for name in files}
        for name, content in files.items():
            self.files[paths[name]], self.manners[paths[name]] = content, manner
        return {name: (f"{self.address}{path}",) for name, path in paths.items()}


@contextmanager
def loopback() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(server, self)

        def log_message(self, *arguments: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = True

        def handle_error(self, *arguments: object) -> None:
            pass

    with Quiet(("127.0.0.1", 0), Handler) as service:
        server = Server(f"http://127.0.0.1:{service.server_address[1]}")
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            service.shutdown()
            thread.join()


def _answer(server: Server, request: BaseHTTPRequestHandler) -> None:
    path, wanted = request.path, request.headers.get("Range")
    earlier = sum(1 for name, _ in server.requests if name == path)
    server.requests.append((path, wanted))
    manner = server.manners.get(path, "404")
    content = server.files.get(path, b"")
    request.close_connection = True
    if manner == "404" or (manner == "busy" and not earlier):
        request.send_error(404 if manner == "404" else 503)
        return
    if manner == "redirect":
        request.send_response(302)
        request.send_header("Location", "file:///etc/passwd")
        request.send_header("Content-Length", "0")
        request.end_headers()
        return
    if manner == "wrong":
        content = content[:-1] + bytes([content[-1] ^ 1])
    elif manner == "longer":
        content += b"more"
    start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and manner not in ("no range", "endless") else 0
    request.send_response(206 if start else 200)
    if start:
        offset = start + 1 if manner == "wrong part" else start
        request.send_header("Content-Range", f"bytes {offset}-{len(content) - 1}/{len(content)}")
    if manner != "endless":
        request.send_header("Content-Length", str(len(content) - start))
    request.end_headers()
    body = content[start:]
    if (manner in ("drop", "no range", "wrong part") and not earlier) or manner == "always drop":
        body = body[: len(body) // 2]
    elif manner == "drop often":
        body = body[: max(1, len(content) // 10)]
    elif manner == "hang":
        body = body[:100]
    elif manner == "endless":
        body = body + bytes(1 << 16)
    server.sent += len(body)  # before the client can have it, and ask for the number
    request.wfile.write(body)
    request.wfile.flush()
    if manner == "hang":
        server.stopping.wait(10)
