"""Readers of the official files, end to end through `fetch` from a server that drops the connection halfway."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from official_archives import (
    MAKERS,
    MINI_CLASSES,
    QUICK,
    SMALL,
    Server,
    cifar10,
    entry,
    loopback,
    mat,
    mini_lists,
    mini_pictures,
    svhn,
    zipped,
)
from PIL import Image

from crmatch.data.images import resize
from crmatch.data.load import load_data
from crmatch.data.official.catalog import CATALOG
from crmatch.data.official.download import digests
from crmatch.data.official.fetch import check, fetch, inventory
from crmatch.data.packed import read_packed, write_packed
from crmatch.errors import DataError, RequestError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with loopback() as running:
        yield running


@pytest.mark.parametrize("name", MAKERS)
def test_official_files_arrive_as_they_were_meant(tmp_path: Path, server: Server, name: str) -> None:
    made = MAKERS[name]()
    catalog = {name: entry(name, made.files, server.serve(made.files, "drop"))}
    path = fetch(name, tmp_path, catalog=catalog, patience=QUICK)
    found = read_packed(path)
    assert found.keys() == made.truth.keys()
    for key, expected in made.truth.items():
        assert np.array_equal(found[key], expected), key
    assert server.sent == sum(map(len, made.files.values()))  # every byte once: the second connection continued
    assert [wanted is not None for _, wanted in server.requests] == [False, True] * len(made.files)
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.npz", f"{name}.json", f".{name}.npz.lock"}
    assert check(name, tmp_path, catalog).problems == ()


def test_a_fetched_set_is_loaded_by_name(tmp_path: Path) -> None:
    made = MAKERS["stl10"]()
    (tmp_path / "file.tar.gz").write_bytes(made.files["stl10_binary.tar.gz"])
    fetch("stl10", tmp_path / "data", source=tmp_path / "file.tar.gz", catalog={"stl10": entry("stl10", made.files)})
    data = load_data("stl10", tmp_path / "data")
    assert data.train.images.shape == (320, 3, 96, 96)
    assert data.train.labels[20:].eq(-1).all()
    assert np.array_equal(data.train.images[3].permute(1, 2, 0).numpy(), made.truth["train_images"][3])


def test_the_sidecar_says_where_a_set_came_from(tmp_path: Path, server: Server) -> None:
    made = cifar10()
    catalog = {"cifar10": entry("cifar10", made.files, server.serve(made.files))}
    path = fetch("cifar10", tmp_path, catalog=catalog, patience=QUICK)
    described = json.loads((tmp_path / "cifar10.json").read_text())
    (source,) = catalog["cifar10"].files
    assert described["sources"] == [{"name": source.name, "bytes": source.size, "md5": source.md5, "sha256": source.sha256}]
    assert described["packed"] == {"bytes": path.stat().st_size} | digests(path, ["sha256"])
    assert described["counts"] == SMALL["cifar10"]
    assert described["origin"] == CATALOG["cifar10"].homepage
    assert described["date"].endswith("+00:00")


def test_a_set_that_is_there_is_not_fetched_again(tmp_path: Path, server: Server) -> None:
    made = cifar10()
    catalog = {"cifar10": entry("cifar10", made.files, server.serve(made.files))}
    first = fetch("cifar10", tmp_path, catalog=catalog, patience=QUICK)
    stamp = first.stat().st_mtime_ns
    assert fetch("cifar10", tmp_path, catalog=catalog, patience=QUICK) == first
    assert first.stat().st_mtime_ns == stamp
    assert len(server.requests) == 1


@pytest.mark.parametrize("given", ["directory", "one of the files"])
def test_a_set_of_two_files_is_taken_from_a_directory(tmp_path: Path, given: str) -> None:
    made = svhn()
    for name, content in made.files.items():
        (tmp_path / name).write_bytes(content)
    source = tmp_path if given == "directory" else tmp_path / "test_32x32.mat"
    path = fetch("svhn", tmp_path / "data", source=source, catalog={"svhn": entry("svhn", made.files)})
    found = read_packed(path)
    assert np.array_equal(found["train_labels"], made.truth["train_labels"])
    assert {0, 1} <= set(found["train_labels"].tolist())
    assert (tmp_path / "train_32x32.mat").exists()


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.float64])
@pytest.mark.parametrize("compressed", [True, False])
def test_every_way_to_store_svhn_is_read(tmp_path: Path, kind: type, compressed: bool) -> None:
    made = svhn()
    for part in ("train", "test"):
        digits = np.array([[digit or 10] for digit in made.truth[f"{part}_labels"]], kind)
        made.files[f"{part}_32x32.mat"] = mat(np.stack(list(made.truth[f"{part}_images"]), axis=3), digits, compressed)
        (tmp_path / f"{part}_32x32.mat").write_bytes(made.files[f"{part}_32x32.mat"])
    found = read_packed(fetch("svhn", tmp_path / "data", source=tmp_path, catalog={"svhn": entry("svhn", made.files)}))
    assert all(np.array_equal(found[key], expected) for key, expected in made.truth.items())


def test_svhn_extra_joins_the_training_images(tmp_path: Path) -> None:
    made, more = svhn(0), svhn(1)
    files = made.files | {"extra_32x32.mat": more.files["train_32x32.mat"]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    known = entry("svhn", files)._replace(counts={"train": 74, "test": 12})
    found = read_packed(fetch("svhn_extra", tmp_path / "data", source=tmp_path, catalog={"svhn_extra": known}))
    assert np.array_equal(found["train_images"][37:], more.truth["train_images"])
    assert np.array_equal(found["train_labels"][:37], made.truth["train_labels"])


def test_a_copy_with_the_wrong_checksum_or_without_a_file_is_refused_and_kept(tmp_path: Path) -> None:
    made = svhn()
    catalog = {"svhn": entry("svhn", made.files)}
    train = tmp_path / "train_32x32.mat"
    train.write_bytes(made.files[train.name])
    with pytest.raises(DataError, match=r"there is no test_32x32\.mat in .*\nSVHN.* needs train_32x32\.mat and test_32x32"):
        fetch("svhn", tmp_path / "data", source=train, catalog=catalog)
    content = bytearray(made.files[train.name])
    content[-1] ^= 1
    train.write_bytes(content)
    with pytest.raises(DataError, match=r"train_32x32\.mat has md5 .*\nIt is not the official"):
        fetch("svhn", tmp_path / "data", source=train, catalog=catalog)
    assert train.read_bytes() == content
    with pytest.raises(DataError, match=r"there is no .*nowhere"):
        fetch("svhn", tmp_path / "data", source=tmp_path / "nowhere", catalog=catalog)
    assert not list((tmp_path / "data").glob("*.npz"))


def lay_out(folder: Path, layout: str) -> Path:
    """mini-ImageNet as people have it."""
    pictures = mini_pictures()
    members = {f"pictures/{name}": content for name, content in pictures.items()}
    if layout != "directories":
        members = {f"images/{Path(name).name}": content for name, content in pictures.items()}
        members |= {name: text.encode() for name, text in mini_lists().items()}
    if layout == "zip":
        (folder / "mini.zip").write_bytes(zipped(members))
        return folder / "mini.zip"
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / ".DS_Store").write_bytes(b"not a picture")
    return folder


@pytest.mark.parametrize("layout", ["directories", "lists", "zip"])
def test_mini_imagenet_is_split_by_the_documented_rule(tmp_path: Path, layout: str) -> None:
    (tmp_path / "source").mkdir()
    source = lay_out(tmp_path / "source", layout)
    catalog = {"mini_imagenet": entry("mini_imagenet", {})}
    found = read_packed(fetch("mini_imagenet", tmp_path / "data", source=source, catalog=catalog))
    random = np.random.RandomState(42)
    pictures = mini_pictures()
    train, test = [], []
    for name in sorted(MINI_CLASSES):
        order = random.permutation(7)
        train += [f"{name}/{name}{number:08}.jpg" for number in sorted(order[:5])]
        test += [f"{name}/{name}{number:08}.jpg" for number in sorted(order[5:])]
    for part, names in (("train", train), ("test", test)):
        expected = [decoded(pictures[name]) for name in names]
        assert np.array_equal(found[f"{part}_images"], np.stack(expected))
        assert found[f"{part}_labels"].tolist() == [MINI_CLASSES.index(name.partition("/")[0]) for name in names]
    assert found["class_names"].tolist() == sorted(MINI_CLASSES)
    assert check("mini_imagenet", tmp_path / "data", catalog).ok


def decoded(content: bytes) -> Any:
    """One picture through `images.resize`, the way every other set is resized."""
    pixels = np.array(Image.open(io.BytesIO(content)).convert("RGB"))
    return resize(torch.from_numpy(pixels).permute(2, 0, 1)[None], 84)[0].permute(1, 2, 0).numpy()


def test_unreadable_pictures_are_all_named(tmp_path: Path) -> None:
    source = lay_out(tmp_path, "directories")
    for name in MINI_CLASSES[:2]:
        picture = source / "pictures" / name / f"{name}00000002.jpg"
        picture.write_bytes(picture.read_bytes()[:500])
    with pytest.raises(DataError, match=r"2 in number: pictures/n01532829/n0153282900000002.jpg, pictures/n01558993/"):
        fetch("mini_imagenet", tmp_path / "data", source=source, catalog={"mini_imagenet": entry("mini_imagenet", {})})
    assert [file.name for file in (tmp_path / "data").iterdir()] == [".mini_imagenet.npz.lock"]


def test_pictures_of_other_modes_are_read(tmp_path: Path) -> None:
    source = lay_out(tmp_path / "source", "directories")
    for picture, mode in zip(sorted(source.rglob("*.jpg")), ["L", "CMYK", "L", "RGB"] * 6, strict=False):
        Image.open(picture).convert(mode).save(picture, "JPEG")
    fetch("mini_imagenet", tmp_path / "data", source=source, catalog={"mini_imagenet": entry("mini_imagenet", {})})


def test_a_set_without_a_public_file_asks_for_a_copy(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no public file to download .*\nGive your copy.* mini_imagenet --from PATH"):
        fetch("mini_imagenet", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_set_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"unknown data set 'cifr10'\.\nDid you mean 'cifar10'\?"):
        fetch("cifr10", tmp_path)
    with pytest.raises(RequestError, match=r"unknown data set 'cifr10'\.\nDid you mean 'cifar10'\?"):
        check("cifr10", tmp_path)
    with pytest.raises(DataError, match=r"CIFAR-10 is not in .*\nGet it with: crmatch data fetch cifar10"):
        check("cifar10", tmp_path)


@pytest.fixture
def fetched(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A directory with the small cifar10, and its catalog."""
    made = cifar10()
    (tmp_path / "file").write_bytes(made.files["cifar-10-binary.tar.gz"])
    catalog: dict[str, Any] = {"cifar10": entry("cifar10", made.files)}
    fetch("cifar10", tmp_path / "data", source=tmp_path / "file", catalog=catalog)
    return tmp_path / "data", catalog


def test_check_notices_a_changed_file_wrong_counts_and_wrong_labels(fetched: tuple[Path, dict[str, Any]]) -> None:
    folder, catalog = fetched
    report = check("cifar10", folder, catalog)
    assert report.ok
    assert report.counts == SMALL["cifar10"]
    assert report.origin == str(folder.parent / "file")
    arrays = read_packed(folder / "cifar10.npz")
    labels = arrays["test_labels"].copy()
    labels[3] = 10
    changed: dict[str, Any] = arrays | {"train_images": arrays["train_images"][1:], "test_labels": labels}
    write_packed(folder / "cifar10.npz", changed)
    problems = check("cifar10", folder, catalog).problems
    assert "has changed since it was fetched" in problems[0]
    assert problems[1:3] == ("49 train images, not 50", "49 train images with 50 labels")
    assert "test labels from 0 to 10 for 10 classes" in problems[3]


def test_a_set_found_in_place_is_taken_over_if_it_is_the_right_one(fetched: tuple[Path, dict[str, Any]]) -> None:
    folder, catalog = fetched
    (folder / "cifar10.json").unlink()
    assert fetch("cifar10", folder, catalog=catalog) == folder / "cifar10.npz"
    assert check("cifar10", folder, catalog).origin == "found in place"
    (folder / "cifar10.json").unlink()
    with pytest.raises(DataError, match=r"is there, but is not CIFAR-10: 50 train images, not 50,000\.\nMove it away"):
        fetch("cifar10", folder)


def test_the_inventory_lists_what_is_here_and_what_could_be(fetched: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = fetched
    write_packed(folder / "mine.npz", dict(read_packed(folder / "cifar10.npz")))
    rows = {row.name: row for row in inventory(folder)}
    assert rows.keys() == {*CATALOG, "mine"}
    here = rows["cifar10"]
    assert (here.path, here.size) == (folder / "cifar10.npz", (folder / "cifar10.npz").stat().st_size)
    assert here.counts == SMALL["cifar10"]
    assert (rows["mine"].origin, rows["mine"].fetchable) == ("unknown", False)
    assert (rows["svhn"].path, rows["svhn"].size) == (None, 182_040_794 + 64_275_384)
    assert (rows["mini_imagenet"].fetchable, rows["mini_imagenet"].size) == (False, None)
    assert len(inventory(folder / "nowhere")) == len(CATALOG)


def test_every_file_of_the_catalog_has_its_checksums_and_addresses() -> None:
    for known in CATALOG.values():
        for file in known.files:
            assert file.size
            assert (len(file.md5 or ""), len(file.sha256 or "")) == (32, 64)
            assert all(url.startswith(("http://", "https://")) and url.endswith(f"/{file.name}") for url in file.urls)
    assert CATALOG["cifar10"].files[0].md5 == "c32a1d4ab5d03f1284b67883e8d87530"
    assert CATALOG["stl10"].packed_size == 113_000 * 96 * 96 * 3
