"""Data sets on disk: fetch them from their official files into packed sets, check them, list them. Imports no torch."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from crmatch.atomic_files import read_json, write_json
from crmatch.data.official.catalog import CATALOG, PARTS, SourceSet
from crmatch.data.official.download import PATIENCE, Patience, digests, download, locked, verify
from crmatch.data.official.mini_imagenet import read_mini_imagenet
from crmatch.data.official.readers import read_cifar, read_digits, read_stl10, read_svhn
from crmatch.data.packed import Array, Arrays, Progress, Rows, packed_path, read_packed, require_space, write_packed
from crmatch.data.settings import default_data_dir
from crmatch.errors import DataError, RequestError, unknown_name_error

READERS: dict[str, Callable[[Sequence[Path], SourceSet], dict[str, Array | Rows]]] = {
    "cifar": read_cifar,
    "svhn": read_svhn,
    "stl10": read_stl10,
    "mini_imagenet": read_mini_imagenet,
    "digits": read_digits,
}
"""Reader -> function from verified files to arrays (mini-ImageNet: from a user's own copy)."""


class InventoryRow(NamedTuple):
    """One line of `crmatch data list`; None if unknown."""

    name: str
    here: bool  # whether it can be used at once
    size: int | None  # bytes of the packed set, or else of the download
    counts: Mapping[str, int] | None  # images per part
    origin: str


class CheckReport(NamedTuple):
    """The result of `crmatch data check`."""

    name: str
    path: Path
    size: int
    origin: str
    sha256: str
    counts: Mapping[str, int]
    per_class: tuple[int, int]  # labeled training images of the smallest and of the largest class
    class_names: tuple[str, ...]
    problems: tuple[str, ...]  # empty if nothing is wrong


def fetch(
    name: str,
    data_dir: Path,
    *,
    source: Path | None = None,
    progress: Progress | None = None,
    catalog: Mapping[str, SourceSet] = CATALOG,
    patience: Patience = PATIENCE,
) -> Path:
    """Bring the set `name` into `data_dir` as a packed set; an interrupted call is resumed by the next one.

    Unfinished downloads are kept in `<data_dir>/downloads`. With `source`, the official file, or the directory that contains
    it, is used instead of a download. The file `<name>.json` next to the packed set describes where it came from.

    Raises:
        RequestError: there is no such set, or it can only be read from a `source`.
        DataError: download, checksum, content or disk have a problem; no incomplete file is left.
    """
    if name not in catalog:
        raise unknown_name_error("data set", name, catalog)
    entry, path = catalog[name], packed_path(name, data_dir)
    if path.is_file() and _sidecar(path).is_file():
        return path
    if not (entry.files or entry.bundled or source or path.is_file()):
        raise RequestError(
            f"{entry.title} has no public file to download ({entry.license}).\n"
            f"Give your copy, a directory or zip file of pictures: crmatch data fetch {name} --from PATH"
        )
    with locked(path, patience.lock):
        if not path.is_file():
            for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # of a killed process: this one holds the lock
                leftover.unlink(missing_ok=True)
            downloads = data_dir / "downloads"
            files = _given(entry, source, progress) if source else _downloaded(entry, downloads, progress, patience)
            write_packed(path, READERS[entry.reader](files, entry), progress)
            _write_sidecar(name, path, entry, files, str(source.resolve()) if source else entry.homepage, progress)
            if source is None:
                for file in files:  # packed; no other process needs them while this one holds the set's lock
                    file.unlink(missing_ok=True)
                    file.with_name(f".{file.name}.lock").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    downloads.rmdir()
        elif not _sidecar(path).is_file():
            if problems := _problems(read_packed(path), entry):
                raise DataError(f"{path} exists, but is not {entry.title}: {problems[0]}.\nMove it away and fetch again.")
            _write_sidecar(name, path, entry, (), "found in place", progress)
    return path


def check(
    name: str, data_dir: Path, catalog: Mapping[str, SourceSet] = CATALOG, progress: Progress | None = None
) -> CheckReport:
    """Compare hash, counts and labels of a packed set with its description and with the catalog."""
    path, entry = packed_path(name, data_dir), catalog.get(name)
    if not path.is_file():
        raise missing_set_error(name, data_dir, catalog)
    arrays = read_packed(path)
    problems = _problems(arrays, entry)
    digest = digests(path, ["sha256"], progress)["sha256"]
    described = _described(path)
    if described and described.get("packed", {}).get("sha256") != digest:
        problems.insert(0, "the file has changed since it was fetched (its sha256 differs)")
    names = tuple(str(label) for label in arrays["class_names"].tolist())
    sizes = [int((arrays["train_labels"] == label).sum()) for label in range(len(names))]
    return CheckReport(
        name, path, path.stat().st_size, str(described.get("origin", "unknown")), digest, _counts(arrays),
        (min(sizes, default=0), max(sizes, default=0)), names, tuple(problems),
    )  # fmt: skip


def require_set(name: str, data_dir: Path) -> None:
    """Raise the error that names the command for getting the set, unless it is in `data_dir` or comes with a package."""
    if not packed_path(name, data_dir).is_file() and not (name in CATALOG and CATALOG[name].bundled):
        raise missing_set_error(name, data_dir)


def missing_set_error(name: str, data_dir: Path, catalog: Mapping[str, SourceSet] = CATALOG) -> DataError | RequestError:
    """The error for a set that is not in `data_dir`, with the command that gets it."""
    if name not in catalog:
        return unknown_name_error("data set", name, {*catalog, *(file.stem for file in data_dir.glob("*.npz"))})
    entry = catalog[name]
    command = f"crmatch data fetch {name}" + ("" if entry.files or entry.bundled else " --from PATH")
    if data_dir != default_data_dir():
        command += f" --data-dir {data_dir}"
    size = f" (download of {entry.download_size / 1e6:,.0f} MB)" if entry.files else ""
    return DataError(f"{entry.title} is not in {data_dir}.\nGet it with: {command}{size}")


def inventory(data_dir: Path, catalog: Mapping[str, SourceSet] = CATALOG) -> list[InventoryRow]:
    """All packed sets in `data_dir` and all other sets of the catalog."""
    rows = []
    for name in sorted({*catalog, *(file.stem for file in data_dir.glob("*.npz"))}):
        entry, path = catalog.get(name), packed_path(name, data_dir)
        if path.is_file():
            described = _described(path)
            origin = str(described.get("origin", "unknown"))
            rows.append(InventoryRow(name, True, path.stat().st_size, described.get("counts"), origin))
        elif entry:
            size = entry.download_size if entry.files or entry.bundled else None
            rows.append(InventoryRow(name, entry.bundled, size, entry.counts, entry.homepage))
    return rows


def _given(entry: SourceSet, source: Path, progress: Progress | None) -> list[Path]:
    """The verified files at `source`: the file itself, and others next to it or in it by their official names."""
    if not source.exists():
        raise DataError(f"there is no {source}.\nGive {entry.title} as --from FILE or --from DIRECTORY.")
    if not entry.files:
        return [source]
    folder = source if source.is_dir() else source.parent
    paths = [folder / file.name for file in entry.files]
    if source.is_file() and len(paths) == 1:
        paths = [source]
    for file, path in zip(entry.files, paths, strict=True):
        if not path.is_file():
            needed = " and ".join(file.name for file in entry.files)
            raise DataError(f"there is no {file.name} in {folder}.\n{entry.title} needs {needed}.")
        try:
            problem = verify(path, file, progress)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        if problem:
            raise DataError(f"{path} {problem}.\nIt is not the official {file.name} of {entry.homepage}")
    return paths


def _downloaded(entry: SourceSet, folder: Path, progress: Progress | None, patience: Patience) -> list[Path]:
    names = [name for file in entry.files for name in (file.name, f"{file.name}.part")]
    here = sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
    require_space(folder.parent, max(0, entry.download_size - here) + entry.packed_size)
    return [download(file, folder / file.name, progress, patience) for file in entry.files]


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
    sources = [{"name": file.name, "bytes": file.size} | file.checksums for file in entry.files] if files else []
    if not entry.files and files and files[0].is_file():
        sources = [{"name": files[0].name, "bytes": files[0].stat().st_size} | digests(files[0], ["sha256"], progress)]
    values = {
        "name": name,
        "title": entry.title,
        "origin": origin,
        "license": entry.license,
        "sources": sources,
        "packed": {"bytes": path.stat().st_size} | digests(path, ["sha256"], progress),
        "counts": _counts(read_packed(path)),
        "classes": entry.classes,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_json(_sidecar(path), values)


def _counts(arrays: Arrays) -> dict[str, int]:
    return {part: len(arrays[f"{part}_images"]) for part in PARTS if f"{part}_images" in arrays}


def _problems(arrays: Arrays, entry: SourceSet | None) -> list[str]:
    """Everything that is wrong with the arrays of a set."""
    problems = []
    counts, classes = _counts(arrays), len(arrays["class_names"])
    expected = {part: entry.counts.get(part, 0) for part in PARTS} if entry else counts
    for part, count in expected.items():
        found, labels = counts.get(part, 0), arrays.get(f"{part}_labels")
        if found != count:
            problems.append(f"{found:,} {part} images, not {count:,}")
        if labels is not None and len(labels) != found:
            problems.append(f"{found:,} {part} images with {len(labels):,} labels")
        if labels is not None and not 0 <= labels.min() <= labels.max() < classes:
            problems.append(f"{part} labels from {labels.min()} to {labels.max()} for {classes} classes")
    if entry and classes != entry.classes:
        problems.append(f"{classes} classes, not {entry.classes}")
    return problems
