"""mini-ImageNet is read from a user's own files, which have no checksum: good ones are split by the rule, bad ones refused."""

from __future__ import annotations

import io
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from official_archives import MINI_CLASSES, bad_zips, entry, mini_lists, mini_pictures, zipped
from PIL import Image

from crmatch.data.images import resize
from crmatch.data.official.fetch import check, fetch
from crmatch.data.packed import read_packed
from crmatch.errors import DataError

CATALOG = {"mini_imagenet": entry("mini_imagenet", {})}


def lay_out(folder: Path, layout: str) -> Path:
    """mini-ImageNet as people have it."""
    pictures = mini_pictures()
    members = {f"pictures/{name}": content for name, content in pictures.items()}
    if layout != "directories":
        members = {f"images/{Path(name).name}": content for name, content in pictures.items()} | mini_lists()
    if layout == "zip":
        folder.mkdir(exist_ok=True)
        (folder / "mini.zip").write_bytes(zipped(members))
        return folder / "mini.zip"
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / ".DS_Store").write_bytes(b"not a picture")
    return folder


def decoded(content: bytes) -> Any:
    """One picture through `images.resize`, as every other set is resized."""
    pixels = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
    return resize(torch.from_numpy(pixels).permute(2, 0, 1)[None], 84)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("layout", ["directories", "lists", "zip"])
def test_mini_imagenet_is_split_by_the_documented_rule(tmp_path: Path, layout: str) -> None:
    source = lay_out(tmp_path / "source", layout)
    found = read_packed(fetch("mini_imagenet", tmp_path / "data", source=source, catalog=CATALOG))
    random = np.random.RandomState(42)
    pictures = mini_pictures()
    train, test = [], []
    for name in sorted(MINI_CLASSES):
        order = random.permutation(7)
        train += [f"{name}/{name}{number:08}.jpg" for number in sorted(order[:5])]
        test += [f"{name}/{name}{number:08}.jpg" for number in sorted(order[5:])]
    for part, names in (("train", train), ("test", test)):
        assert np.array_equal(found[f"{part}_images"], np.stack([decoded(pictures[name]) for name in names]))
        assert found[f"{part}_labels"].tolist() == [MINI_CLASSES.index(name.partition("/")[0]) for name in names]
    assert found["class_names"].tolist() == sorted(MINI_CLASSES)
    assert not check("mini_imagenet", tmp_path / "data", CATALOG).problems


def test_unreadable_pictures_are_all_named(tmp_path: Path) -> None:
    source = lay_out(tmp_path, "directories")
    for name in MINI_CLASSES[:2]:
        picture = source / "pictures" / name / f"{name}00000002.jpg"
        picture.write_bytes(picture.read_bytes()[:500])
    with pytest.raises(DataError, match=r"2 .*: pictures/n01532829/n0153282900000002.jpg, pictures/n01558993/"):
        fetch("mini_imagenet", tmp_path / "data", source=source, catalog=CATALOG)
    assert [file.name for file in (tmp_path / "data").iterdir()] == [".mini_imagenet.npz.lock"]


def test_pictures_of_other_modes_are_read(tmp_path: Path) -> None:
    source = lay_out(tmp_path / "source", "directories")
    for picture, mode in zip(sorted(source.rglob("*.jpg")), ["L", "CMYK", "L", "RGB"] * 6, strict=False):
        Image.open(picture).convert(mode).save(picture, "JPEG")
    fetch("mini_imagenet", tmp_path / "data", source=source, catalog=CATALOG)


@pytest.mark.parametrize("kind", bad_zips())
def test_a_bad_zip_is_refused_with_a_short_message_and_takes_no_memory_time_or_disk(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mini.zip").write_bytes(bad_zips()[kind])
    began = time.monotonic()
    tracemalloc.start()
    with pytest.raises(DataError) as failure:
        fetch("mini_imagenet", tmp_path / "data", source=tmp_path / "mini.zip", catalog=CATALOG)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20
    assert time.monotonic() - began < 5
    assert failure.value.exit_code == 3
    lines = str(failure.value).splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() and len(line) < 600 for line in lines)
    assert {path.name for path in tmp_path.rglob("*")} == {"mini.zip", "data", ".mini_imagenet.npz.lock"}
