"""Benchmark sets on disk: fetched from their official files into packed sets, checked, listed. Imports no torch."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crmatch.atomic_files import read_json, write_json
from crmatch.data.official.catalog import CATALOG, PARTS, SourceSet
from crmatch.data.official.download import PATIENCE, Patience, digests, download, locked, verify
from crmatch.data.packed import (
    Array,
    Arrays,
    Progress,
    Rows,
    cannot_write,
    packed_path,
    read_packed,
    require_space,
    temporary_files,
    write_packed,
)
from crmatch.errors import DataError, RequestError, unknown_name_error


class InventoryRow(NamedTuple):
    """One line of `crmatch data list`."""

    name: str
    title: str
    path: Path | None
    """None when the set is not here."""
    size: int | None
    """Bytes on disk, or else of the download."""
    counts: Mapping[str, int] | None
    origin: str
    fetchable: bool
    """Whether `crmatch data fetch` can get it without `--from`."""
    license: str


class CheckReport(NamedTuple):
    """What `crmatch data check` found."""

    name: str
    path: Path
    size: int
    origin: str
    sha256: str
    counts: Mapping[str, int]
    per_class: tuple[int, int]
    """Fewest and most labeled training images of a class."""
    class_names: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def fetch(
    name: str,
    data_dir: Path,
    *,
    source: Path | None = None,
    progress: Progress | None = None,
    catalog: Mapping[str, SourceSet] = CATALOG,
    patience: Patience = PATIENCE,
) -> Path:
    """Bring the set `name` into `data_dir`, packed; at once when it is there. Whenever interrupted, call it again.

    Args:
        name: key of the catalog.
        data_dir: where packed sets lie; unfinished downloads lie in its folder `downloads`.
        source: the official file, or the directory that holds it, instead of a download.
        progress: shows download, verification and conversion.
        catalog: what there is.
        patience: timeouts and retries of the download.

    Returns:
        The packed set; beside it lies `<name>.json`, which says where it came from.

    Raises:
        RequestError: there is no such set, or it can only be read from a `source`.
        DataError: download, checksum, content or disk are not as they should be; nothing half-written stays.
    """
    if name not in catalog:
        raise unknown_name_error("data set", name, catalog)
    entry, path = catalog[name], packed_path(name, data_dir)
    if path.is_file() and _sidecar(path).is_file():
        return path
    if not entry.files and source is None and not path.is_file():
        raise RequestError(
            f"{entry.title} has no public file to download ({entry.license}).\n"
            f"Give your copy, a directory or zip file of pictures: crmatch data fetch {name} --from PATH"
        )
    with locked(path, patience.lock):
        if not path.is_file():
            for leftover in temporary_files(path):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            downloads = data_dir / "downloads"
            files = _given(entry, source, progress) if source else _downloaded(entry, downloads, progress, patience)
            write_packed(path, _reader(entry.reader)(files, entry), progress)
            _write_sidecar(name, path, entry, files, str(source.resolve()) if source else entry.homepage, progress)
            if source is None:
                _remove(files, downloads)
        elif not _sidecar(path).is_file():
            if problems := _problems(read_packed(path), entry):
                raise DataError(f"{path} is there, but is not {entry.title}: {problems[0]}.\nMove it away and fetch again.")
            _write_sidecar(name, path, entry, (), "found in place", progress)
    return path


def check(
    name: str, data_dir: Path, catalog: Mapping[str, SourceSet] = CATALOG, progress: Progress | None = None
) -> CheckReport:
    """Hash, counts and labels of a packed set, compared with what was written when it was fetched and with the catalog."""
    path, entry = packed_path(name, data_dir), catalog.get(name)
    if not path.is_file():
        if entry is None:
            raise unknown_name_error("data set", name, {*catalog, *(file.stem for file in data_dir.glob("*.npz"))})
        raise DataError(f"{entry.title} is not in {data_dir}.\nGet it with: crmatch data fetch {name}")
    arrays = read_packed(path)
    problems = list(_problems(arrays, entry))
    digest = digests(path, ["sha256"], progress)["sha256"]
    described = _described(path)
    if described and described.get("packed", {}).get("sha256") != digest:
        problems.insert(0, "the file has changed since it was fetched (its sha256 is another one)")
    names = tuple(str(label) for label in arrays["class_names"].tolist())
    labels = arrays["train_labels"]
    sizes = [int((labels == label).sum()) for label in range(len(names))]
    return CheckReport(
        name, path, path.stat().st_size, str(described.get("origin", "unknown")), digest, _counts(arrays),
        (min(sizes, default=0), max(sizes, default=0)), names, tuple(problems),
    )  # fmt: skip


def inventory(data_dir: Path, catalog: Mapping[str, SourceSet] = CATALOG) -> list[InventoryRow]:
    """All packed sets of `data_dir` and all sets of the catalog that are not among them."""
    rows = []
    for name in sorted({*catalog, *(file.stem for file in data_dir.glob("*.npz"))}):
        entry, path = catalog.get(name), packed_path(name, data_dir)
        fetchable = entry is not None and bool(entry.files)
        title, terms = (entry.title, entry.license) if entry else (name, "")
        if path.is_file():
            described = _described(path)
            origin = str(described.get("origin", "unknown"))
            rows.append(InventoryRow(name, title, path, path.stat().st_size, described.get("counts"), origin, fetchable, terms))
        elif entry:
            sizes = [file.size for file in entry.files if file.size is not None]
            size = sum(sizes) if entry.files and len(sizes) == len(entry.files) else None
            rows.append(InventoryRow(name, title, None, size, entry.counts, entry.homepage, fetchable, terms))
    return rows


def _reader(name: str) -> Callable[[Sequence[Path], SourceSet], dict[str, Array | Rows]]:
    from crmatch.data.official.cifar import read_cifar
    from crmatch.data.official.mini_imagenet import read_mini_imagenet
    from crmatch.data.official.stl10 import read_stl10
    from crmatch.data.official.svhn import read_svhn

    return {
        "cifar10": read_cifar,
        "cifar100": read_cifar,
        "svhn": read_svhn,
        "stl10": read_stl10,
        "mini_imagenet": read_mini_imagenet,
    }[name]


def _given(entry: SourceSet, source: Path, progress: Progress | None) -> list[Path]:
    """The files at `source`, verified: the file itself, and those beside it or in it by their official names."""
    if not os.path.exists(source):
        raise DataError(f"there is no {source}.\nGive {entry.title} as --from FILE or --from DIRECTORY.")
    if not entry.files:
        return [source]
    folder = source if source.is_dir() else source.parent
    paths = [folder / file.name for file in entry.files]
    if source.is_file() and len(paths) == 1:
        paths = [source]
    for file, path in zip(entry.files, paths, strict=True):
        if not path.is_file():
            raise DataError(f"there is no {file.name} in {folder}.\n{entry.title} needs {_listed(entry)}.")
        try:
            problem = verify(path, file.size, file.checksums, progress)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        if problem:
            raise DataError(f"{path} {problem}.\nIt is not the official {file.name} of {entry.homepage}")
    return paths


def _downloaded(entry: SourceSet, folder: Path, progress: Progress | None, patience: Patience) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    names = [name for file in entry.files for name in (file.name, f"{file.name}.part")]
    here = sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
    require_space(folder, max(0, sum(file.size or 0 for file in entry.files) - here) + entry.packed_size)
    return [
        download(file.urls, folder / file.name, size=file.size, checksums=file.checksums, progress=progress, patience=patience)
        for file in entry.files
    ]


def _remove(files: Sequence[Path], folder: Path) -> None:
    """Delete downloads that have become a packed set; their set's lock is held, so no one else wants them."""
    with contextlib.suppress(OSError):
        for file in files:
            file.unlink()
            file.with_name(f".{file.name}.lock").unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".json")


def _described(path: Path) -> dict[str, Any]:
    try:
        values = read_json(_sidecar(path))
    except DataError:
        return {}
    return values if isinstance(values, dict) else {}


def _write_sidecar(
    name: str, path: Path, entry: SourceSet, files: Sequence[Path], origin: str, progress: Progress | None
) -> None:
    arrays = read_packed(path)
    sources: list[dict[str, Any]] = [
        {"name": official.name, "bytes": file.stat().st_size} | official.checksums
        for official, file in zip(entry.files, files, strict=False)
    ]
    if not entry.files and files and files[0].is_file():
        sources = [{"name": files[0].name, "bytes": files[0].stat().st_size} | digests(files[0], ["sha256"], progress)]
    write_json(
        _sidecar(path),
        {
            "name": name,
            "title": entry.title,
            "origin": origin,
            "license": entry.license,
            "sources": sources,
            "packed": {"bytes": path.stat().st_size} | digests(path, ["sha256"], progress),
            "counts": _counts(arrays),
            "classes": entry.classes,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    )


def _counts(arrays: Arrays) -> dict[str, int]:
    return {part: len(arrays[f"{part}_images"]) for part in PARTS if f"{part}_images" in arrays}


def _problems(arrays: Arrays, entry: SourceSet | None) -> list[str]:
    """Everything about the arrays that is not as it should be."""
    problems = []
    classes = len(arrays["class_names"])
    for part, count in _counts(arrays).items():
        labels = arrays.get(f"{part}_labels")
        if entry and count != entry.counts.get(part, 0):
            problems.append(f"{count:,} {part} images, not {entry.counts.get(part, 0):,}")
        if labels is not None and len(labels) != count:
            problems.append(f"{count:,} {part} images with {len(labels):,} labels")
        if labels is not None and not 0 <= labels.min() <= labels.max() < classes:
            problems.append(f"{part} labels from {labels.min()} to {labels.max()} for {classes} classes")
    if entry and classes != entry.classes:
        problems.append(f"{classes} classes, not {entry.classes}")
    if entry and "unlabeled" in entry.counts and "unlabeled_images" not in arrays:
        problems.append("no unlabeled images")
    return problems


def _listed(entry: SourceSet) -> str:
    return " and ".join(file.name for file in entry.files)
