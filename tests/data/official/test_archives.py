"""Archives from strangers: whatever is in them, nothing is written and the answer is one short message."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_archives import HOSTILE, cifar10, entry, hostile_content, hostile_tar, hostile_zip, tar, zipped

from crmatch.data.official.fetch import fetch
from crmatch.data.official.members import ZipMembers, tar_members
from crmatch.errors import DataError


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder if len(files) > 1 else folder / next(iter(files))


def test_two_hundred_hostile_archives_leave_nothing_behind(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for number in range(200):
        generate, kind = HOSTILE[number % len(HOSTILE)]
        name, files = generate(kind, np.random.default_rng(number), outside)
        source = write(tmp_path / "source", files)
        before = tree(tmp_path)
        with pytest.raises(DataError) as failure:
            fetch(name, tmp_path / "cache", source=source, catalog={name: entry(name, files)})
        message = str(failure.value)
        assert len(message.splitlines()) == 2, (kind, message)
        assert all(line.isprintable() and len(line) < 400 for line in message.splitlines()), (kind, message)
        assert failure.value.exit_code == 3
        assert tree(tmp_path) - before == {"cache", f"cache/.{name}.npz.lock"}, kind
        shutil.rmtree(tmp_path / "source")
        shutil.rmtree(tmp_path / "cache")


@pytest.mark.parametrize(
    ("generate", "kind"),
    [
        (hostile_tar, "bomb"),
        (hostile_tar, "trailing bomb"),
        (hostile_tar, "huge extended header"),
        (hostile_content, "svhn bomb"),
        (hostile_content, "svhn label bomb"),
        (hostile_zip, "zip lying size"),
        (hostile_zip, "zip huge picture"),
    ],
)
def test_a_bomb_takes_neither_memory_nor_time(tmp_path: Path, generate: Any, kind: str) -> None:
    name, files = generate(kind, np.random.default_rng(0), tmp_path)
    source = write(tmp_path / "source", files)
    catalog = {name: entry(name, files)}
    began = time.monotonic()
    tracemalloc.start()
    with pytest.raises(DataError):
        fetch(name, tmp_path / "cache", source=source, catalog=catalog)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("compressed", [True, False])
def test_every_kind_of_tar_is_read(tmp_path: Path, format: int, compressed: bool) -> None:
    members = {"a.bin": bytes(range(256)) * 9, "b.txt": b"one\n\n two \n", "other": b"nobody asked"}
    content = tar(members, "folder", format)
    path = tmp_path / "file"
    path.write_bytes(content if compressed else gzip.decompress(content))
    found = {}
    for member in tar_members(path, {"folder/a.bin": 5000, "folder/b.txt": 100}):
        found[member.name] = member.lines() if member.name.endswith("txt") else member.read(5) + member.read()
    assert found == {"folder/a.bin": members["a.bin"], "folder/b.txt": ["one", "two"]}


def test_an_extended_header_names_the_next_member_only(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "global"}) as archive:
        for name, headers in (("./né" + "x" * 120, {"mtime": "1.25"}), ("./plain", {})):
            info = tarfile.TarInfo(name)
            info.pax_headers, info.size = headers, 3
            archive.addfile(info, io.BytesIO(b"abc"))
    (tmp_path / "file").write_bytes(buffer.getvalue())
    wanted = {"né" + "x" * 120: 3, "plain": 3}
    assert {member.name: member.read() for member in tar_members(tmp_path / "file", wanted)} == dict.fromkeys(wanted, b"abc")


def test_members_that_are_not_read_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(tar({"a": b"x" * 700, "b": b"y" * 3}, "f"))
    assert [member.name for member in tar_members(tmp_path / "file", {"f/a": 700, "f/b": 3})] == ["f/a", "f/b"]


def test_a_missing_member_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(tar({"a": b"x"}, "f"))
    with pytest.raises(DataError, match="it has no f/b"):
        list(tar_members(tmp_path / "file", {"f/a": 1, "f/b": 1}))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        list(tar_members(tmp_path / "nothing", {}))


def test_every_cut_of_an_archive_is_noticed(tmp_path: Path) -> None:
    whole = cifar10().files["cifar-10-binary.tar.gz"]
    wanted = {f"cifar-10-batches-bin/data_batch_{k}.bin": 30_730 for k in range(1, 6)}
    for length in range(0, len(whole) - 1, len(whole) // 40):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(DataError):
            [member.read() for member in tar_members(tmp_path / "cut", wanted)]


def test_a_zip_gives_its_files_and_no_directories(tmp_path: Path) -> None:
    (tmp_path / "file.zip").write_bytes(zipped({"a/": b"", "a/b.txt": b"text", "./c": b"d"}))
    archive = ZipMembers(tmp_path / "file.zip", 1000)
    assert sorted(archive.names) == ["a/b.txt", "c"]
    assert archive.open("a/b.txt").read() == b"text"
    archive.close()
