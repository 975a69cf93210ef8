"""Small archives in the exact official layouts, hostile ones, and a loopback server that serves them well or badly.

Pixels are written value by value from the layout's description, so that a reader is compared with an independent answer.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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
    """Official files by name, and what a reader must find in them."""

    files: dict[str, bytes]
    truth: dict[str, Array]


def entry(name: str, files: Mapping[str, bytes], urls: Mapping[str, tuple[str, ...]] | None = None) -> SourceSet:
    """The catalog's entry with small counts and the checksums of these files."""
    sources = tuple(
        SourceFile(
            file,
            (urls or {}).get(file, ()),
            len(content),
            hashlib.md5(content).hexdigest(),
            hashlib.sha256(content).hexdigest(),
        )
        for file, content in files.items()
    )
    changes: dict[str, Any] = {"files": sources, "counts": SMALL[name]}
    if name == "mini_imagenet":
        changes |= {"classes": len(MINI_CLASSES), "files": ()}
    return CATALOG[name]._replace(**changes)


def tar(members: Mapping[str, bytes], folder: str, format: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar.gz with a directory entry first, as the official ones are."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=format, compresslevel=1) as archive:
        directory = tarfile.TarInfo(folder)
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for name, content in members.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            info.size, info.mtime, info.uname = len(content), 1_244_000_000, "kriz"
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


def cifar10(seed: int = 0, **changes: bytes) -> Made:
    random = np.random.default_rng(seed)
    train, test = (images_and_labels(random, SMALL["cifar10"][part], 32, 10) for part in ("train", "test"))
    records = [bytes([label]) + planes(image) for image, label in zip(*train, strict=True)]
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    members = {f"data_batch_{k + 1}.bin": b"".join(records[10 * k : 10 * k + 10]) for k in range(5)}
    members["test_batch.bin"] = b"".join(bytes([label]) + planes(image) for image, label in zip(*test, strict=True))
    members |= {"batches.meta.txt": ("\n".join(names) + "\n\n").encode(), "readme.html": b"<html></html>"} | changes
    return Made({"cifar-10-binary.tar.gz": tar(members, "cifar-10-batches-bin")}, truth(train, test, names))


def cifar100(seed: int = 0) -> Made:
    random = np.random.default_rng(seed)
    train, test = (images_and_labels(random, SMALL["cifar100"][part], 32, 100) for part in ("train", "test"))
    members = {
        f"{part}.bin": b"".join(bytes([label // 5, label]) + planes(image) for image, label in zip(*data, strict=True))
        for part, data in (("train", train), ("test", test))
    }
    fine, coarse = ([f"{kind} {k}" for k in range(count)] for kind, count in (("fine", 100), ("coarse", 20)))
    members |= {"fine_label_names.txt": "\n".join(fine).encode(), "coarse_label_names.txt": "\n".join(coarse).encode()}
    return Made({"cifar-100-binary.tar.gz": tar(members, "cifar-100-binary", tarfile.PAX_FORMAT)}, truth(train, test, fine))


def svhn(seed: int = 0) -> Made:
    random = np.random.default_rng(seed)
    files, data = {}, {}
    for part in ("train", "test"):
        data[part] = images_and_labels(random, SMALL["svhn"][part], 32, 10)
        images, digits = data[part]
        digits[:2] = 0, 1
        files[f"{part}_32x32.mat"] = mat(np.stack(list(images), axis=3), np.array([[d or 10] for d in digits], np.uint8))
    return Made(files, truth(data["train"], data["test"], [str(k) for k in range(10)]))


def mat(images: Array, labels: Array | None, compressed: bool = True) -> bytes:
    buffer = io.BytesIO()
    savemat(buffer, {"X": images} | ({} if labels is None else {"y": labels}), do_compression=compressed)
    return buffer.getvalue()


def stl10(seed: int = 0, **changes: bytes) -> Made:
    random = np.random.default_rng(seed)
    counts = SMALL["stl10"]
    train, test = (images_and_labels(random, counts[part], 96, 10) for part in ("train", "test"))
    unlabeled = np.repeat(random.integers(0, 256, (3, 96, 96, 3), dtype=np.uint8), counts["unlabeled"] // 3, axis=0)
    unlabeled[:, 0, 0, 0] = np.arange(counts["unlabeled"]) % 251
    third = counts["unlabeled"] // 3  # those of a third differ in one value only: writing each value by value takes long
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
    } | changes
    found = truth(train, test, names) | {"unlabeled_images": unlabeled, "folds": folds}
    return Made({"stl10_binary.tar.gz": tar(members, "stl10_binary", tarfile.USTAR_FORMAT)}, found)


MAKERS = {"cifar10": cifar10, "cifar100": cifar100, "svhn": svhn, "stl10": stl10}


def truth(train: tuple[Array, Array], test: tuple[Array, Array], names: list[str]) -> dict[str, Array]:
    return {
        "train_images": train[0],
        "train_labels": train[1],
        "test_images": test[0],
        "test_labels": test[1],
        "class_names": np.array(names),
    }


@cache
def mini_pictures(seed: int = 0) -> dict[str, bytes]:
    """Seven pictures of three classes, named as Ravi and Larochelle's lists name them."""
    random = np.random.default_rng(seed)
    pictures = {}
    for name in MINI_CLASSES:
        for number in range(7):
            height, width = random.integers(90, 130, 2)
            buffer = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG", compress_level=1)
            pictures[f"{name}/{name}{number:08}.jpg"] = buffer.getvalue()
    return pictures


def mini_lists() -> dict[str, str]:
    lists = {}
    for list_name, label in zip(("train.csv", "val.csv", "test.csv"), MINI_CLASSES, strict=True):
        rows = [f"{label}{number:08}.jpg,{label}" for number in (3, 1, 0, 2, 6, 5, 4)]
        lists[list_name] = "\n".join(["filename,label", *rows]) + "\n"
    return lists


def zipped(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


# Hostile archives. Each generator returns (name of the set, its files); the catalog's entry is made with their checksums,
# so that they are parsed although they are hostile.


def hostile_tar(kind: str, random: np.random.Generator, outside: Path) -> tuple[str, dict[str, bytes]]:
    content = gzip.decompress(cifar10(int(random.integers(3))).files["cifar-10-binary.tar.gz"])
    buffer = io.BytesIO()
    buffer.write(content.rstrip(b"\0"))
    buffer.write(b"\0" * (-buffer.tell() % 512))
    start = buffer.tell()
    depth = "../" * int(random.integers(1, 6))
    payload = random.bytes(int(random.integers(1, 900)))
    info = tarfile.TarInfo("cifar-10-batches-bin/notes.txt")
    if kind == "absolute":
        info.name = str(outside / "evil")
    elif kind == "parent":
        info.name = f"{depth}outside/evil"
    elif kind == "hidden parent":
        info.name = f"cifar-10-batches-bin/{depth}{depth}outside/evil"
    elif kind == "backslash":
        info.name = "..\\..\\outside\\evil"
    elif kind == "newline":
        info.name = "cifar-10-batches-bin/a\nb\nc"
    elif kind in ("symlink", "hardlink"):
        info.type = tarfile.SYMTYPE if kind == "symlink" else tarfile.LNKTYPE
        info.linkname, payload = str(outside / "evil"), b""
    elif kind in ("device", "block device", "fifo"):
        info.type = {"device": tarfile.CHRTYPE, "block device": tarfile.BLKTYPE, "fifo": tarfile.FIFOTYPE}[kind]
        payload = b""
    elif kind == "duplicate":
        info.name = f"cifar-10-batches-bin/data_batch_{random.integers(1, 6)}.bin"
    elif kind == "missing member":
        content = content.replace(b"data_batch_3.bin", b"data_batch_9.bin")
        return "cifar10", {"cifar-10-binary.tar.gz": gzip.compress(_checksums(content), 1)}
    info.size = len(payload)
    buffer.write(info.tobuf(tarfile.GNU_FORMAT) + payload + b"\0" * (-len(payload) % 512))
    if kind == "huge size":
        buffer.seek(start)
        buffer.write(_header(b"cifar-10-batches-bin/more", size=b"%011o" % (1 << 32)))
    elif kind == "negative size":
        buffer.seek(start)
        buffer.write(_header(b"cifar-10-batches-bin/more", size=b"\xff" * 12))
    elif kind == "huge extended header":
        buffer.seek(start)
        buffer.write(_header(b"pax", b"x", b"%011o" % (1 << 32)) + b"9" * 4096)
    elif kind == "digits in an extended header":
        buffer.seek(start)
        buffer.write(_header(b"pax", b"x", b"%011o" % 65_024) + b"9" * 65_024)
    elif kind == "extended name":
        record = b"29 path=../../../../outside/x\n"
        record = b"%d path=../../../../outside/x\n" % len(record)
        buffer.seek(start)
        buffer.write(_header(b"pax", b"x", b"%011o" % len(record)) + record.ljust(512, b"\0"))
        buffer.write(_header(b"cifar-10-batches-bin/more", size=b"%011o" % 0))
    elif kind == "long name":
        long = tarfile.TarInfo("a/" * 80 + depth + "evil")
        buffer.write(long.tobuf(tarfile.GNU_FORMAT))
    elif kind == "many members":
        buffer.write(b"".join(_header(b"cifar-10-batches-bin/%d" % number, size=b"0" * 11) for number in range(1200)))
    packed = gzip.compress(buffer.getvalue() + b"\0" * 1024, 1)
    if kind == "bomb":  # 200 MiB of zeros in 200 KB, as members that nobody asked for
        zeros = gzip.compress(b"\0" * (1 << 20), 9)
        packed = gzip.compress(buffer.getvalue(), 1)
        for number in range(4):
            packed += gzip.compress(_header(b"cifar-10-batches-bin/z%d" % number, size=b"%011o" % (50 << 20)), 1) + zeros * 50
    elif kind == "trailing bomb":
        packed += gzip.compress(b"\0" * (1 << 20), 9) * 100
    elif kind == "truncated":
        packed = packed[: int(random.integers(1, len(packed) - 4))]
    elif kind == "flipped":
        position = int(random.integers(len(packed) // 4, len(packed) - 8))
        packed = packed[:position] + bytes([packed[position] ^ 0xFF]) + packed[position + 1 :]
    elif kind == "noise":
        packed = random.bytes(int(random.integers(0, 3000)))
    elif kind == "compressed noise":
        packed = gzip.compress(random.bytes(int(random.integers(1, 3000))))
    elif kind == "text":
        packed = b"<html>404: the file has moved</html>"
    return "cifar10", {"cifar-10-binary.tar.gz": packed}


def hostile_content(kind: str, random: np.random.Generator, outside: Path) -> tuple[str, dict[str, bytes]]:
    """Right containers with wrong contents: sizes, labels, names, folds."""
    batch = random.integers(0, 10, (10, 3073), dtype=np.uint8)
    if kind == "label too large":
        batch[int(random.integers(10)), 0] = int(random.integers(10, 256))
        return "cifar10", cifar10(**{"data_batch_2.bin": batch.tobytes()}).files
    if kind == "batch too short":
        return "cifar10", cifar10(**{"data_batch_4.bin": batch.tobytes()[: int(random.integers(0, 30_000))]}).files
    if kind == "batch too long":
        return "cifar10", cifar10(**{"test_batch.bin": batch.tobytes() * 3}).files
    if kind == "eleven names":
        return "cifar10", cifar10(**{"batches.meta.txt": b"\n".join(b"%d" % k for k in range(11))}).files
    if kind == "names in bytes":
        return "cifar10", cifar10(**{"batches.meta.txt": b"\xff\xfe" + random.bytes(60)}).files
    if kind == "stl label zero":
        return "stl10", stl10(**{"train_y.bin": bytes([*range(1, 11), *range(10)])}).files
    if kind == "stl label eleven":
        return "stl10", stl10(**{"test_y.bin": bytes(range(2, 12))}).files
    if kind == "stl folds":
        folds = [b"0 1 2 3 \n" * 9, b"0 1 2 20 \n" * 10, b"0 1 2 2 \n" * 10, b"0 1 2 x \n" * 10, b"9" * 9000, b"\xff" * 99]
        return "stl10", stl10(**{"fold_indices.txt": folds[int(random.integers(len(folds)))]}).files
    if kind == "stl unlabeled too short":
        return "stl10", stl10(**{"unlabeled_X.bin": b"\0" * 27_648 * 299}).files
    good = svhn(int(random.integers(3))).files
    images, labels = np.zeros((32, 32, 3, 37), np.uint8), np.ones((37, 1), np.uint8)
    train = good["train_32x32.mat"]
    if kind == "svhn label":
        labels[int(random.integers(37))] = int(random.choice([0, 11, 255]))
        train = mat(images, labels)
    elif kind == "svhn half a label":
        train = mat(images, labels + 0.5)
    elif kind == "svhn shape":
        train = mat(images.transpose(3, 0, 1, 2), labels)
    elif kind == "svhn type":
        train = mat(images.astype(np.float32), labels)
    elif kind == "svhn cells":
        train = mat(np.array([images, "x"], dtype=object), labels)
    elif kind == "svhn count":
        train = mat(images[..., :36], labels[:36])
    elif kind == "svhn no labels":
        train = mat(images, labels[:5])
    elif kind == "svhn truncated":
        train = train[: int(random.integers(0, len(train) - 1))]
    elif kind == "svhn flipped":
        position = int(random.integers(200, len(train) // 2))
        train = train[:position] + bytes([train[position] ^ 0xFF]) + train[position + 1 :]
    elif kind == "svhn noise":
        train = random.bytes(int(random.integers(1, 2000)))
    elif kind == "svhn label bomb":  # the labels claim four gigabytes, and bring 64 MiB of them
        train = mat(images, None) + _bomb(b"y", (37, 1), 0xF0000000)
    elif kind == "svhn bomb":
        train = train[:128] + _bomb(b"X", (32, 32, 3, 1 << 20), 3072 << 20) + _bomb(b"y", (1 << 20, 1), 1 << 20)
    elif kind == "svhn twice":
        train += train[128:]
    return "svhn", good | {"train_32x32.mat": train}


@cache
def _bomb(name: bytes, shape: tuple[int, ...], size: int) -> bytes:
    """A compressed MATLAB variable of class uint8 that claims `size` bytes, and brings 64 MiB."""
    sizes = struct.pack(f"<{len(shape)}I", *shape)
    content = struct.pack("<2I", 14, 0xF0000000) + struct.pack("<4I", 6, 8, 9, 0)
    content += struct.pack("<2I", 5, len(sizes)) + sizes.ljust(-(-len(sizes) // 8) * 8, b"\0")
    content += struct.pack("<2I", 1, len(name)) + name.ljust(8, b"\0") + struct.pack("<2I", 2, size)
    squeezed = zlib.compress(content + b"\1" * (64 << 20), 1)
    return struct.pack("<2I", 15, len(squeezed)) + squeezed


def hostile_zip(kind: str, random: np.random.Generator, outside: Path) -> tuple[str, dict[str, bytes]]:
    """Zip files for mini-ImageNet."""
    pictures = dict(mini_pictures(int(random.integers(3))))
    some = str(random.choice(sorted(pictures)))
    extra = zipfile.ZipInfo("notes.txt")
    payload = b"x"
    if kind == "zip absolute":
        extra.filename = extra.orig_filename = str(outside / "evil")
    elif kind == "zip parent":
        extra.filename = extra.orig_filename = "../../outside/evil"
    elif kind == "zip symlink":
        extra.external_attr, payload = 0o120777 << 16, str(outside / "evil").encode()
    elif kind == "zip device":
        extra.external_attr = 0o020666 << 16
    elif kind == "zip bomb":
        payload = b"\0" * (1 << 20)
    elif kind == "zip broken picture":
        pictures[some] = pictures[some][: len(pictures[some]) // 2]
    elif kind == "zip huge picture":
        header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
        chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
        pictures[some] = b"\x89PNG\r\n\x1a\n" + chunk
    elif kind == "zip picture missing":
        del pictures[some]
    elif kind == "zip list":
        lists = {name: text.encode() for name, text in mini_lists().items()}
        lists["val.csv"] = [b"filename,label\n../../outside/evil,a\n", b"a,b\nc,d\n", b"\xff" * 50][int(random.integers(3))]
        pictures |= lists
    elif kind == "zip two lists":
        pictures |= {name: text.encode() for name, text in list(mini_lists().items())[:2]}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in pictures.items():
            archive.writestr(name, content)
        archive.writestr(extra, payload, zipfile.ZIP_DEFLATED)
    content = buffer.getvalue()
    if kind == "zip bomb":
        content = content.replace(struct.pack("<I", 1 << 20), struct.pack("<I", 1 << 30))
    elif kind == "zip duplicate":
        content = content.replace(b"/n0153282900000001", b"/n0153282900000002")
    elif kind == "zip lying size":  # the directory says one byte, the data inflate to a megabyte
        content = zipped(pictures | {some: b"\0" * (1 << 20)}).replace(struct.pack("<I", 1 << 20), struct.pack("<I", 1))
    elif kind == "zip truncated":
        content = content[: int(random.integers(1, len(content) - 30))]
    elif kind == "zip noise":
        content = random.bytes(int(random.integers(0, 3000)))
    return "mini_imagenet", {"mini.zip": content}


TAR_KINDS = (
    "absolute", "parent", "hidden parent", "backslash", "newline", "symlink", "hardlink", "device", "block device", "fifo",
    "duplicate", "missing member", "huge size", "negative size", "huge extended header", "digits in an extended header",
    "extended name", "long name", "many members", "bomb", "trailing bomb", "truncated", "flipped", "noise",
    "compressed noise", "text",
)  # fmt: skip
CONTENT_KINDS = (
    "label too large", "batch too short", "batch too long", "eleven names", "names in bytes", "stl label zero",
    "stl label eleven", "stl folds", "stl unlabeled too short", "svhn label", "svhn half a label", "svhn shape", "svhn type",
    "svhn cells", "svhn count", "svhn no labels", "svhn truncated", "svhn flipped", "svhn noise", "svhn bomb",
    "svhn label bomb", "svhn twice",
)  # fmt: skip
ZIP_KINDS = (
    "zip absolute", "zip parent", "zip symlink", "zip device", "zip bomb", "zip broken picture", "zip huge picture",
    "zip picture missing", "zip list", "zip two lists", "zip duplicate", "zip lying size", "zip truncated", "zip noise",
)  # fmt: skip
HOSTILE = (
    *((hostile_tar, kind) for kind in TAR_KINDS),
    *((hostile_content, kind) for kind in CONTENT_KINDS),
    *((hostile_zip, kind) for kind in ZIP_KINDS),
)


def _header(name: bytes, kind: bytes = b"0", size: bytes = b"0" * 11) -> bytes:
    block = name.ljust(100, b"\0") + b"0000644\0" * 3 + size.ljust(12, b"\0") + b"0" * 11 + b"\0" + b" " * 8 + kind
    block = block.ljust(257, b"\0") + b"ustar  \0"
    block = block.ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _checksums(content: bytes) -> bytes:
    """The same tar file with the right checksum in every header that begins with the folder's name."""
    blocks = [content[start : start + 512] for start in range(0, len(content), 512)]
    for number, block in enumerate(blocks):
        if block.startswith(b"cifar-10-batches-bin"):
            bare = block[:148] + b" " * 8 + block[156:]
            blocks[number] = block[:148] + b"%06o\0 " % sum(bare) + block[156:]
    return b"".join(blocks)


@dataclass
class Server:
    """A loopback server: path -> content, and how it misbehaves."""

    address: str
    files: dict[str, bytes] = field(default_factory=dict)
    manners: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Range header) of every request."""
    sent: int = 0
    """Bytes of content that left."""
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
    if wanted and start >= len(content):
        request.send_error(416)
        return
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
    request.wfile.write(body)
    request.wfile.flush()
    server.sent += len(body)
    if manner == "hang":
        server.stopping.wait(10)
