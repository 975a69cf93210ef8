from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from official_archives import RecordedProgress

from crmatch.data import packed
from crmatch.data.packed import Rows, packed_image_shape, read_packed, write_packed
from crmatch.errors import DataError


def arrays(count: int = 30, side: int = 12) -> dict[str, Any]:
    images = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return {
        "train_images": images,
        "train_labels": np.arange(count) % 3,
        "test_images": images[::2].transpose(0, 2, 1, 3),
        "test_labels": np.arange(count)[::2] % 3,
        "class_names": np.array(["cat", "dög", "<script>"]),
    }


def test_what_is_written_comes_back_and_numpy_reads_it_too(tmp_path: Path) -> None:
    write_packed(tmp_path / "set.npz", arrays())
    with np.load(tmp_path / "set.npz") as other:
        for key, expected in arrays().items():
            assert np.array_equal(read_packed(tmp_path / "set.npz")[key], expected)
            assert np.array_equal(other[key], expected)
    assert packed_image_shape(tmp_path / "set.npz") == (12, 12, 3)
    assert [file.name for file in tmp_path.iterdir()] == ["set.npz"]


def test_the_same_arrays_give_the_same_bytes(tmp_path: Path) -> None:
    write_packed(tmp_path / "a.npz", arrays())
    time.sleep(0.01)
    write_packed(tmp_path / "b.npz", arrays())
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_rows_are_written_as_they_are_made(tmp_path: Path) -> None:
    images = arrays()["train_images"]
    rows = Rows(images.shape, (images[start : start + 7] for start in range(0, 30, 7)))
    write_packed(tmp_path / "set.npz", arrays() | {"train_images": rows})
    assert np.array_equal(read_packed(tmp_path / "set.npz")["train_images"], images)


def test_progress_is_told_every_byte(tmp_path: Path) -> None:
    progress = RecordedProgress()
    write_packed(tmp_path / "set.npz", arrays(), progress)
    total = sum(array.nbytes for array in arrays().values())
    assert progress.starts == [(total, 0, "writing set.npz")]
    assert progress.bytes == [total]


@pytest.mark.parametrize("fortran", [False, True])
def test_large_members_are_mapped_and_can_be_written_to_without_changing_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fortran: bool
) -> None:
    monkeypatch.setattr(packed, "MAPPED_FROM", 1000)
    if fortran:
        np.savez(tmp_path / "set.npz", **arrays() | {"train_images": np.asfortranarray(arrays()["train_images"])})
    else:
        write_packed(tmp_path / "set.npz", arrays())
    content = (tmp_path / "set.npz").read_bytes()
    found = read_packed(tmp_path / "set.npz")
    assert isinstance(found["train_images"].base, np.memmap)
    assert not isinstance(found["train_labels"].base, np.memmap)
    assert np.array_equal(found["train_images"], arrays()["train_images"])
    torch.from_numpy(found["train_images"])[0] = 7
    assert (found["train_images"][0] == 7).all()
    del found
    assert (tmp_path / "set.npz").read_bytes() == content


def test_small_members_are_verified_and_compressed_ones_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "set.npz", **arrays())
    assert np.array_equal(read_packed(tmp_path / "set.npz")["train_images"], arrays()["train_images"])
    write_packed(tmp_path / "set.npz", arrays())
    content = bytearray((tmp_path / "set.npz").read_bytes())
    content[5000] ^= 1
    (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(DataError, match="CRC"):
        read_packed(tmp_path / "set.npz")


def test_a_damaged_file_with_mapped_members_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MAPPED_FROM", 1000)
    write_packed(tmp_path / "set.npz", arrays())
    content = (tmp_path / "set.npz").read_bytes()
    random = np.random.default_rng(0)
    damaged = [content[:length] for length in range(0, len(content), 997)]
    headers = [*range(200), *range(len(content) - 600, len(content))]
    for position in [*headers, *random.integers(0, len(content), 200).tolist()]:
        damaged.append(content[:position] + bytes([content[position] ^ (1 << random.integers(8))]) + content[position + 1 :])
    for version in damaged:
        (tmp_path / "set.npz").write_bytes(version)
        with contextlib.suppress(DataError):
            assert int(read_packed(tmp_path / "set.npz")["train_images"].sum()) >= 0  # every mapped page can be touched


def test_a_member_that_claims_more_than_it_has_is_refused(tmp_path: Path) -> None:
    write_packed(tmp_path / "set.npz", arrays())
    content = (tmp_path / "set.npz").read_bytes().replace(b"'shape': (30, 12", b"'shape': (99, 12")
    (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(DataError, match="does not contain what its header says"):
        read_packed(tmp_path / "set.npz")


@pytest.mark.parametrize("error", [DataError("source broke"), KeyboardInterrupt()])
def test_a_source_that_breaks_while_it_is_written_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def chunks() -> Any:
        yield arrays()["train_images"][:10]
        raise error

    with pytest.raises(type(error)):
        write_packed(tmp_path / "set.npz", arrays() | {"train_images": Rows((30, 12, 12, 3), chunks())})
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(DataError, match="cannot write"):
        write_packed(tmp_path / "file" / "set.npz", arrays())


MEMORY = """
import resource, sys, time
from pathlib import Path
from crmatch.data.packed import read_packed
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
arrays = read_packed(Path(sys.argv[1]))
assert arrays["train_images"].shape[1:] == (32, 32, 3) and arrays["train_images"][-1].sum() == 0
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.process
def test_four_gigabytes_open_at_once_and_are_not_read(tmp_path: Path) -> None:
    """A sparse file: the pixels are a hole, so it takes no space; CIFAR-10 is a twentieth of it."""
    path, count = tmp_path / "set.npz", (4 << 30) // 3072 + 1
    size = count * 3072
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for key in ("test_images", "test_labels", "class_names", "train_labels"):
            with archive.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, arrays()[key])
        with archive.open("train_images.npy", "w", force_zip64=True) as member:
            layout = {"descr": "|u1", "fortran_order": False, "shape": (count, 32, 32, 3)}
            np.lib.format.write_array_header_1_0(member, layout)
            file.seek(size, os.SEEK_CUR)
            member._file_size += size  # type: ignore[attr-defined]
            member._compress_size += size  # type: ignore[attr-defined]
    assert path.stat().st_blocks * 512 < 1 << 24
    result = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, result.stdout.split())
    assert seconds < 1
    assert kilobytes < 64 << 10
