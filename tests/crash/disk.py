"""A layer beneath the files of one folder: it counts operations, lets one of them fail, and knows what a crash would leave.

Operations are create, truncate, allocate, write, fsync, rename, unlink, mkdir and rmdir of Python code; what worker processes
and memory maps write is found in the files themselves. The model of a disk is the weakest that POSIX allows:

- the content of a file is safe from its last fsync on; of what was written later any part may be there, others may be zeros;
- a name (of a new, renamed or removed file or directory) is safe from the next fsync of its directory on.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

Fate = Literal["kept", "lost", "cut", "holes", "mixed"]
FATES: tuple[Fate, ...] = ("kept", "lost", "cut", "holes", "mixed")
"""After a kill all is kept. After a power failure what was not synced is lost, half written, half zeros, or any of these."""
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
DIRECTORY = -1  # instead of a file's number
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Snapshot(NamedTuple):
    """The folder between two operations: numbers of files by path, and contents by number; now, and what is safe."""

    names: dict[str, int]
    contents: dict[int, bytes]
    safe_names: dict[str, int]
    safe_contents: dict[int, bytes]

    def after(self, fate: Fate, seed: int) -> dict[str, bytes | None]:
        """Contents by path after a crash; None for a directory."""
        source = random.Random(seed)
        if fate == "mixed":
            names = {}
            for path in sorted({*self.names, *self.safe_names}):
                number = source.choice([self.names, self.safe_names]).get(path)
                names |= {} if number is None else {path: number}
        else:
            names = self.safe_names if fate == "lost" else self.names
        found: dict[str, bytes | None] = {}
        for path, number in sorted(names.items()):
            if all(str(parent) in found for parent in Path(path).parents[:-1]):
                one: Fate = source.choice(FATES[:-1]) if fate == "mixed" else fate
                found[path] = None if number == DIRECTORY else self._content(number, one)
        return found

    def _content(self, number: int, fate: Fate) -> bytes:
        safe = self.safe_contents.get(number, b"")
        now = self.contents.get(number, safe)
        if now == safe or fate in ("kept", "lost"):
            return now if fate == "kept" else safe
        start = len(safe) if now.startswith(safe) else 0
        middle = (start + len(now)) // 2
        return now[:middle] if fate == "cut" else now[:start] + bytes(middle - start) + now[middle:]


class Disk:
    """The files below `root`, while the context is active.

    Attributes:
        operations: kind and path of every operation, e.g. ("fsync", "runs/spec.json").
        snapshots: the folder before each operation, and at last after all; only if `records`.
    """

    def __init__(self, root: Path, records: bool = False, fails: Callable[[int], int | None] = lambda number: None) -> None:
        """`fails` maps the number of an operation to the error with which it fails, or to None."""
        self.root, self.operations, self.snapshots = str(root), list[tuple[str, str]](), list[Snapshot]()
        self._records, self._fails, self._numbers = records, fails, itertools.count()
        self._names: dict[str, int] = {}
        self._safe_contents: dict[int, bytes] = {}
        for path in sorted(root.rglob("*")):
            relative = str(path.relative_to(root))
            self._names[relative] = DIRECTORY if path.is_dir() else next(self._numbers)
            if path.is_file():
                self._safe_contents[self._names[relative]] = path.read_bytes()
        self._safe_names = dict(self._names)

    @contextmanager
    def active(self) -> Iterator[Disk]:
        """Count the operations of this process from now on."""
        real, raw = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}, io.open
        disk = self

        class Raw(io.FileIO):
            """A file whose writes are counted, whatever buffers are above it."""

            def write(self, content: Any) -> int:
                disk._operation("write", str(self.name))
                return super().write(content)

            def truncate(self, size: int | None = None) -> int:
                disk._operation("truncate", str(self.name))
                return super().truncate(size)

        def opened(file: Any, mode: str = "r", buffering: int = -1, *others: Any, **options: Any) -> Any:
            if mode.strip("bt") == "r" or isinstance(file, int) or self._inside(file) is None:
                return raw(file, mode, buffering, *others, **options)
            kind = "create" if not os.path.exists(file) else "truncate" if "w" in mode else None
            if kind:
                self._operation(kind, file)
            bare = Raw(file, mode.replace("b", "").replace("t", ""))
            self._added(file)
            if buffering == 0:
                return bare
            buffered = io.BufferedRandom(bare) if "+" in mode else io.BufferedWriter(bare)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *others, **options)

        def os_open(path: Any, flags: int, *others: Any, **options: Any) -> int:
            creates = flags & os.O_CREAT and self._inside(path) is not None and not os.path.exists(path)
            if creates:
                self._operation("create", path)
            descriptor: int = real["open"](path, flags, *others, **options)
            if creates:
                self._added(path)
            return descriptor

        def fsync(descriptor: int) -> None:
            path = real["readlink"](f"/proc/self/fd/{descriptor}")
            if self._operation("fsync", path):
                self._synced(path)

        def moved(before: Any, after: Any) -> None:
            if self._operation("rename", after):
                assert not os.path.isdir(before), "the layer follows no renamed directories"
                real["replace"](before, after)
                self._names[self._path(after)] = self._names.pop(self._path(before))
            else:
                real["replace"](before, after)

        def counted(kind: str, name: str) -> Callable[..., Any]:
            def call(path: Any, *others: Any, **options: Any) -> Any:
                if not self._operation(kind, path):
                    return real[name](path, *others, **options)
                answer = real[name](path, *others, **options)
                if kind == "mkdir":
                    self._names[self._path(path)] = DIRECTORY
                elif kind != "allocate":
                    del self._names[self._path(path)]
                return answer

            return call

        with (
            mock.patch.multiple(
                os,
                open=os_open,
                fsync=fsync,
                replace=moved,
                rename=moved,
                unlink=counted("unlink", "unlink"),
                remove=counted("unlink", "remove"),
                mkdir=counted("mkdir", "mkdir"),
                rmdir=counted("rmdir", "rmdir"),
                posix_fallocate=counted("allocate", "posix_fallocate"),
            ),
            mock.patch.object(builtins, "open", opened),
            mock.patch.object(io, "open", opened),
        ):
            yield self
        if self._records:
            self.snapshots.append(self._snapshot())

    def _path(self, path: Any) -> str:
        return os.path.relpath(os.path.abspath(path), self.root)

    def _inside(self, path: Any) -> str | None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        relative = self._path(os.fspath(path))
        return None if relative.startswith("..") else relative

    def _operation(self, kind: str, path: Any) -> bool:
        """Count an operation and let it fail if it shall; False for a path that is not below the root."""
        relative = self._inside(path)
        if relative is None:
            return False
        number = len(self.operations)
        if self._records:
            self.snapshots.append(self._snapshot())
        self.operations.append((kind, relative))
        if (code := self._fails(number)) is not None:
            raise OSError(code, os.strerror(code), str(path))
        return True

    def _added(self, path: Any) -> None:
        self._names.setdefault(self._path(path), next(self._numbers))

    def _synced(self, path: str) -> None:
        relative = self._path(path)
        if os.path.isdir(path):
            prefix = "" if relative == "." else f"{relative}/"

            def is_child(name: str) -> bool:
                return name.startswith(prefix) and "/" not in name[len(prefix) :]

            others = {name: number for name, number in self._safe_names.items() if not is_child(name)}
            self._safe_names = others | {name: number for name, number in self._names.items() if is_child(name)}
        else:
            self._safe_contents[self._names[relative]] = Path(path).read_bytes()

    def _snapshot(self) -> Snapshot:
        files = {path: number for path, number in self._names.items() if number != DIRECTORY}
        contents = {number: Path(self.root, path).read_bytes() for path, number in files.items()}
        return Snapshot(dict(self._names), contents, dict(self._safe_names), dict(self._safe_contents))


def restore(root: Path, state: dict[str, bytes | None]) -> None:
    """Make `root` contain exactly these files and directories."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path, content in state.items():
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
