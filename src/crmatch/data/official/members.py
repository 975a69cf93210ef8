"""Members of tar and zip files, read without writing any of them.

The tar reader is our own because the standard one, in Python versions we support, follows hostile headers into endless
loops and gigabytes of memory (CVE-2024-6232, CVE-2025-8194) and out of the directory (CVE-2025-4517). Here nothing is
unpacked: a reader gets the bytes of members it named beforehand, each with a largest size, and no file is created.
"""

from __future__ import annotations

import gzip
import io
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from crmatch.data.packed import CHUNK
from crmatch.errors import DataError

LARGEST_ZIP = 1 << 36
MOST_TAR_MEMBERS = 1000
MOST_ZIP_MEMBERS = 250_000
UNLISTED = 1 << 26
"""Bytes of a tar file that may belong to headers and to members nobody asked for."""
_BROKEN = (
    OSError, EOFError, ValueError, KeyError, RuntimeError, MemoryError, OverflowError, zlib.error, struct.error,
    zipfile.BadZipFile,
)  # fmt: skip


def refused(path: Path, reason: str) -> DataError:
    """The error for a file that does not hold what it should."""
    return DataError(f"{path} is refused: {reason}.\nNothing was written. Give an official copy of the file with --from FILE.")


def safe_name(path: Path, name: str) -> str:
    """The name of a member, without a leading `./`; a name that could lead out of a directory is refused."""
    parts = PurePosixPath(name).parts
    if not name or ".." in parts or not name.isprintable() or re.match(r"[/\\]|[A-Za-z]:", name) or "\\" in name:
        raise refused(path, f"it has a member named {ascii(name)[:80]}")
    return "/".join(parts) or "."


class Member:
    """One file inside a tar archive, read forward."""

    def __init__(self, path: Path, name: str, size: int, read: Callable[[int], bytes]) -> None:
        self.name, self.size = name, size
        self._path, self._left, self._read = path, size, read

    def read(self, count: int | None = None) -> bytes:
        """The next `count` bytes, or all that are left."""
        count = min(self._left, self._left if count is None else count)
        self._left -= count
        return self._read(count)

    def skip(self) -> None:
        """Pass over what is left."""
        while self._left:
            self.read(CHUNK)

    def lines(self) -> list[str]:
        """The text of the member, empty lines left out."""
        try:
            return [line.strip() for line in self.read().decode().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise refused(self._path, f"{self.name} is not text") from error


def tar_members(path: Path, largest: Mapping[str, int]) -> Iterator[Member]:
    """The wanted members of a tar or tar.gz file, in its order; each must be read before the next one is asked for.

    Args:
        path: the archive.
        largest: name of each wanted member to the largest size it may have; all of them must be there, once.

    Raises:
        DataError: it is no such archive, is cut off, lacks a member, holds anything but files and directories with
            names that stay inside, or is larger than it may be.
    """
    try:
        with open(path, "rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if compressed else file
            yield from _walk_tar(path, stream, largest)
    except OSError as error:
        raise refused(path, f"it cannot be read: {error.strerror or error}") from error


def _walk_tar(path: Path, stream: IO[bytes] | gzip.GzipFile, largest: Mapping[str, int]) -> Iterator[Member]:
    left = sum(largest.values()) + UNLISTED

    def read(count: int, exact: bool = True) -> bytes:
        nonlocal left
        left -= count
        if left < 0:
            raise refused(path, "it is larger than the official file can be")
        try:
            content = stream.read(count)
        except (OSError, EOFError, zlib.error) as error:
            raise refused(path, f"it is damaged: {str(error)[:80]}") from error
        if exact and len(content) < count:
            raise refused(path, "it is cut off")
        return content

    seen: set[str] = set()
    extended: dict[str, str] = {}
    for _ in range(MOST_TAR_MEMBERS):
        block = read(512, exact=False)
        if not block.strip(b"\0"):
            break
        kind, name, size = _tar_header(path, block, extended)
        padding = -size % 512
        if kind in "xg":
            if size > 1 << 16:
                raise refused(path, "it has a header of more than 64 KiB")
            found = _pax_records(path, read(size + padding)[:size])
            extended = found if kind == "x" else extended
            continue
        extended = {}
        name = safe_name(path, name)
        if name in seen:
            raise refused(path, f"it has two members named {ascii(name)[:80]}")
        seen.add(name)
        if kind not in "05" or (kind == "5" and (size or name in largest)):
            raise refused(path, f"{ascii(name)[:80]} is neither a file nor a directory")
        if size > largest.get(name, UNLISTED):
            raise refused(path, f"{ascii(name)[:80]} has {size:,} bytes, more than the official one")
        member = Member(path, name, size, read)
        if name in largest:
            yield member
        member.skip()
        read(padding)
    else:
        raise refused(path, f"it has more than {MOST_TAR_MEMBERS:,} members")
    while read(CHUNK, exact=False):  # to the end, where gzip's own checksum is compared
        pass
    if missing := sorted(set(largest) - seen):
        raise refused(path, f"it has no {missing[0]}")


def _tar_header(path: Path, block: bytes, extended: Mapping[str, str]) -> tuple[str, str, int]:
    """(type, name, size) of one header block; `extended` holds what a pax header before it said."""
    fields = [block[start:stop].rstrip(b" \0") for start, stop in ((124, 136), (148, 156))]
    if len(block) < 512 or any(not re.fullmatch(rb" *[0-7]+", field) for field in fields):
        raise refused(path, "it is no tar archive or is cut off")
    if sum(block) - sum(block[148:156]) + 8 * 32 != int(fields[1], 8):
        raise refused(path, "a header of it is damaged")
    name, prefix = (block[start:stop].partition(b"\0")[0].decode("utf-8", "replace") for start, stop in ((0, 100), (345, 500)))
    if prefix and block[257:263] == b"ustar\0":
        name = f"{prefix}/{name}"
    name = extended.get("path", name)
    size = int(extended.get("size", "") or str(int(fields[0], 8)))
    kind = chr(block[156]).replace("\0", "0")
    return ("5" if kind == "0" and name.endswith("/") else kind), name, size


def _pax_records(path: Path, content: bytes) -> dict[str, str]:
    records = {}
    while content:
        length, space, _ = content[:8].partition(b" ")
        if not space or not length.isdigit() or not len(length) + 3 < int(length) <= len(content):
            raise refused(path, "an extended header of it is damaged")
        key, _, value = content[len(length) + 1 : int(length) - 1].decode("utf-8", "replace").partition("=")
        records[key] = value
        content = content[int(length) :]
    if any(key.startswith("GNU.sparse") for key in records) or not re.fullmatch(r"\d{0,15}", records.get("size", "")):
        raise refused(path, "an extended header of it is damaged or of an unknown kind")
    return records


class ZipMembers:
    """The regular files of a zip archive, all names and sizes checked before any is read."""

    def __init__(self, path: Path, largest: int) -> None:
        self._path = path
        self._members: dict[str, zipfile.ZipInfo] = {}
        try:
            self._archive = zipfile.ZipFile(path)
        except _BROKEN as error:
            raise refused(path, f"it is no zip archive or is cut off: {str(error)[:80]}") from error
        try:
            self._check(largest)
        except BaseException:
            self.close()
            raise

    def _check(self, largest: int) -> None:
        infos = self._archive.infolist()
        if len(infos) > MOST_ZIP_MEMBERS or sum(info.file_size for info in infos) > LARGEST_ZIP:
            raise refused(self._path, "it is larger than it can be")
        seen: set[str] = set()
        for info in infos:
            name = safe_name(self._path, info.orig_filename)
            kind = stat.S_IFMT(info.external_attr >> 16)
            if name in seen:
                raise refused(self._path, f"it has two members named {ascii(name)[:80]}")
            seen.add(name)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
                raise refused(self._path, f"{ascii(name)[:80]} is encrypted or neither a file nor a directory")
            if info.file_size > largest or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise refused(self._path, f"{ascii(name)[:80]} is too large or packed in an unknown way")
            if not info.is_dir():
                self._members[name] = info

    @property
    def names(self) -> list[str]:
        """Names of all files."""
        return list(self._members)

    def open(self, name: str) -> io.BytesIO:
        """One file, in memory."""
        info = self._members[name]
        try:
            with self._archive.open(info) as member:
                return io.BytesIO(member.read(info.file_size))  # without a count, it would inflate whatever comes
        except _BROKEN as error:
            raise refused(self._path, f"{ascii(name)[:80]} cannot be read: {str(error)[:80]}") from error

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()
