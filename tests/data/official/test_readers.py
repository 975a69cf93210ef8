"""Readers of the official files, end to end through `fetch` from a server that drops the connection halfway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from official_archives import MAKERS, QUICK, SMALL, Server, cifar10, entry, svhn

from crmatch.data.load import load_data
from crmatch.data.official import fetch as fetching
from crmatch.data.official.catalog import CATALOG
from crmatch.data.official.download import digests
from crmatch.data.official.fetch import check, fetch, inventory
from crmatch.data.packed import read_packed, write_packed
from crmatch.errors import DataError, RequestError


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_a_fetched_set_has_exactly_the_bytes_of_its_arrays(tmp_path: Path, server: Server, name: str) -> None:
    made = MAKERS[name]()
    catalog = {name: entry(name, made.files, server.serve(made.files, "drop"))}
    path = fetch(name, tmp_path / "data", catalog=catalog, patience=QUICK)
    write_packed(tmp_path / "expected.npz", made.truth)
    assert path.read_bytes() == (tmp_path / "expected.npz").read_bytes()
    assert server.sent == sum(map(len, made.files.values()))  # every byte once: the second connection resumed
    assert [wanted is not None for _, wanted in server.requests] == [False, True] * len(made.files)
    assert {file.name for file in path.parent.iterdir()} == {f"{name}.npz", f"{name}.json", f".{name}.npz.lock"}
    assert check(name, path.parent, catalog).problems == ()


@pytest.mark.parametrize("way", ["download", "copy"])
@pytest.mark.parametrize("name", MAKERS)
def test_unverified_bytes_never_reach_a_parser(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    read: list[Any] = []
    made, reader = MAKERS[name](), CATALOG[name].reader
    real = fetching.READERS[reader]
    monkeypatch.setitem(fetching.READERS, reader, lambda *arguments: read.append(arguments) or real(*arguments))
    changed = {file: content[:-1] + bytes([content[-1] ^ 1]) for file, content in made.files.items()}
    catalog = {name: entry(name, made.files, server.serve(changed))}
    source = write_files(tmp_path, changed) if way == "copy" else None
    with pytest.raises(DataError, match="has md5"):
        fetch(name, tmp_path / "data", source=source, catalog=catalog, patience=QUICK)
    assert not read
    assert not list((tmp_path / "data").rglob("*.npz"))
    fetch(name, tmp_path / "data", source=write_files(tmp_path, made.files), catalog=catalog)
    assert len(read) == 1  # the right bytes do reach it


def test_the_sidecar_says_where_a_set_came_from_and_it_is_not_fetched_again(tmp_path: Path, server: Server) -> None:
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
    stamp = path.stat().st_mtime_ns
    assert fetch("cifar10", tmp_path, catalog=catalog, patience=QUICK) == path
    assert path.stat().st_mtime_ns == stamp
    assert len(server.requests) == 1


def test_svhn_extra_joins_the_training_images(tmp_path: Path) -> None:
    made, more = svhn(0), svhn(1)
    files = made.files | {"extra_32x32.mat": more.files["train_32x32.mat"]}
    source = write_files(tmp_path, files) / "test_32x32.mat"  # one of the files: the others are next to it
    known = entry("svhn", files)._replace(counts={"train": 74, "test": 12})
    found = read_packed(fetch("svhn_extra", tmp_path / "data", source=source, catalog={"svhn_extra": known}))
    for part, arrays in ((slice(37), made.truth), (slice(37, None), more.truth)):
        assert np.array_equal(found["train_images"][part], arrays["train_images"])
        assert np.array_equal(found["train_labels"][part], arrays["train_labels"])


def test_a_copy_without_a_file_is_refused(tmp_path: Path) -> None:
    made = svhn()
    catalog = {"svhn": entry("svhn", made.files)}
    train = tmp_path / "train_32x32.mat"
    train.write_bytes(made.files[train.name])
    with pytest.raises(DataError, match=r"there is no test_32x32\.mat in .*\nSVHN.* needs train_32x32\.mat and test_32x32"):
        fetch("svhn", tmp_path / "data", source=train, catalog=catalog)
    with pytest.raises(DataError, match=r"there is no .*nowhere"):
        fetch("svhn", tmp_path / "data", source=tmp_path / "nowhere", catalog=catalog)
    assert train.read_bytes() == made.files[train.name]


def test_a_set_without_a_public_file_asks_for_a_copy(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no public file to download .*\nGive your copy.* mini_imagenet --from PATH"):
        fetch("mini_imagenet", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_set_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    for ask in (fetch, check):
        with pytest.raises(RequestError, match=r"unknown data set 'cifr10'\.\nDid you mean 'cifar10'\?"):
            ask("cifr10", tmp_path)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("cifar10", r"crmatch data fetch cifar10 --data-dir .* \(download of 170 MB\)"),
        ("stl10", r"crmatch data fetch stl10 --data-dir .* \(download of 2,640 MB\)"),
        ("mini_imagenet", r"crmatch data fetch mini_imagenet --from PATH --data-dir "),
    ],
)
def test_a_missing_set_is_answered_with_the_command_that_gets_it(tmp_path: Path, name: str, command: str) -> None:
    for ask in (check, load_data):
        with pytest.raises(DataError, match=rf"is not in .*\nGet it with: {command}"):
            ask(name, tmp_path)


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
    assert not report.problems
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
    with pytest.raises(DataError, match=r"is not CIFAR-10: 50 train images, not 50,000\.\nMove it away"):
        fetch("cifar10", folder)


def test_the_inventory_lists_what_is_here_and_what_could_be(fetched: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = fetched
    write_packed(folder / "mine.npz", dict(read_packed(folder / "cifar10.npz")))
    rows = {row.name: row for row in inventory(folder)}
    assert rows.keys() == {*CATALOG, "mine"}
    here = rows["cifar10"]
    assert (here.here, here.size, here.counts) == (True, (folder / "cifar10.npz").stat().st_size, SMALL["cifar10"])
    assert rows["mine"].origin == "unknown"
    assert rows["digits"].here
    assert (rows["svhn"].here, rows["svhn"].size) == (False, 182_040_794 + 64_275_384)
    assert (rows["mini_imagenet"].here, rows["mini_imagenet"].size) == (False, None)
    assert len(inventory(folder / "nowhere")) == len(CATALOG)


def test_every_file_of_the_catalog_has_its_checksums_and_addresses() -> None:
    for known in CATALOG.values():
        for file in known.files:
            assert file.size
            assert (len(file.md5), len(file.sha256)) == (32, 64)
            assert all(url.startswith(("http://", "https://")) and url.endswith(f"/{file.name}") for url in file.urls)
    assert CATALOG["cifar10"].files[0].md5 == "c32a1d4ab5d03f1284b67883e8d87530"
    assert CATALOG["stl10"].packed_size == 113_000 * 96 * 96 * 3
