"""Settings: a data set with a number of labels per class ("cifar10@4", as in the paper), or a folder of pictures.

Imports no torch, so that a wrong name is reported at once.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from crmatch.errors import RequestError, unknown_name_error
from crmatch.own_code import code_in_file, is_reference, short_name

SPLITS = 5
"""Number of fixed splits per setting that the paper's tables average over."""
EPOCH_STEPS = 1024
"""Steps of an epoch in FixMatch's code: 65,536 labeled images in batches of 64. CR-Match's 512 epochs are taken to be these."""


class Benchmark(NamedTuple):
    """The defaults of one data set, as in the paper and its reference implementations."""

    image_size: int
    mirror: bool  # whether mirror images belong to the same class
    network: str
    weight_decay: float = 5e-4
    crmatch_epochs: int = 512  # of EPOCH_STEPS steps; every other method runs 1,024 epochs
    labels_per_class: tuple[int, ...] = ()  # in the paper's tables
    split_rule: Literal["balanced", "proportional", "folds"] = "balanced"
    channels: int = 3
    usb_mirror: bool = True  # in the `usb` recipe; USB also mirrors SVHN
    quick_steps: int = 1000  # length of the `quick` recipe


BENCHMARKS = {
    "cifar10": Benchmark(32, True, "wrn-28-2", labels_per_class=(4, 25, 400)),
    "cifar100": Benchmark(32, True, "wrn-28-8", weight_decay=1e-3, labels_per_class=(4, 25, 100)),
    "svhn": Benchmark(32, False, "wrn-28-2", labels_per_class=(4, 25, 100)),
    "stl10": Benchmark(96, True, "wrn-37-2", crmatch_epochs=300, labels_per_class=(100,), split_rule="folds"),
    "mini_imagenet": Benchmark(84, True, "resnet-18", crmatch_epochs=300, labels_per_class=(40, 100)),
}
"""The paper's five data sets."""
DIGITS = Benchmark(16, False, "wrn-28-2", labels_per_class=(4,), channels=1, usb_mirror=False, quick_steps=1200)
NAMED_SETS = {"digits": DIGITS, **BENCHMARKS}
"""Data sets whose defaults are known without reading their files."""
GENERIC = Benchmark(32, True, "wrn-28-2")
ALIASES = {"miniimagenet": "mini_imagenet", "mini-imagenet": "mini_imagenet"}


class Setting(NamedTuple):
    """A data set, a number of labels per class, and the set's defaults."""

    data: str
    labels_per_class: int
    image_size: int  # of the stored images; the shorter side if they are not square
    channels: int
    defaults: Benchmark
    folder: Path | None = None  # of pictures, which brings its own labels
    labels_file: Path | None = None  # overrides the folder's own labels.csv, or adds labels to those of the setting
    code: str | None = None  # the function from outside the package that makes the images

    @property
    def name(self) -> str:
        """The canonical spelling; for a folder, its name."""
        return self.data if self.folder else f"{self.data}@{self.labels_per_class}"

    @property
    def stem(self) -> str | None:
        """The benchmark that these images, or a subset of them, come from; None for any other set."""
        return next((name for name in BENCHMARKS if self.data == name or self.data.startswith(f"{name}_")), None)

    @property
    def is_benchmark(self) -> bool:
        """Whether this is one of the paper's five data sets in full (a subset is not)."""
        return self.data in BENCHMARKS


def default_data_dir() -> Path:
    """`CRMATCH_DATA` if it is set, else `crmatch` in the XDG cache."""
    if chosen := os.environ.get("CRMATCH_DATA"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "crmatch"


def _resolved(path: Path | None) -> Path | None:
    """The path without links; `Path.resolve` would raise an error for a link to itself."""
    return Path(os.path.realpath(path)) if path else None


def parse_setting(text: str, data_dir: Path | None = None, labels_file: Path | None = None) -> Setting:
    """The setting written as `NAME@LABELS` or `path/mine.py:function@LABELS`, or a folder of pictures given by its path.

    A packed set with another name takes mirroring and weight decay from the benchmark that its name begins with
    (`svhn_small` from `svhn`), the image size from its file, and WRN-28-2 as its network up to 48 pixels.
    """
    own, _, labels = text.rpartition("@")
    if is_reference(own) and re.fullmatch(r"[1-9]\d{0,8}", labels):
        return own_setting(code_in_file(own), int(labels), labels_file)
    is_name = re.fullmatch(r"[^/\s]+@\d{1,9}", text) is not None
    if text and not is_name and len(text) < 4096 and (os.sep in text or os.path.isdir(text)):
        return _folder_setting(Path(text), labels_file)
    data, _, labels = text.lower().partition("@")
    data = ALIASES.get(data, data)
    if not is_name or int(labels) == 0:
        folders = [path.name for path in Path().iterdir() if path.is_dir()]
        near = difflib.get_close_matches(text, folders, n=1)
        guess = f"Did you mean the folder {near[0]!r}? " if near else ""
        raise RequestError(
            f"{text[:80]!r} is not a setting.\n"
            f"{guess}Write DATASET@LABELS_PER_CLASS, for example digits@4, or the path of a folder of pictures."
        )
    if known := NAMED_SETS.get(data):
        setting = Setting(data, int(labels), known.image_size, known.channels, known)
    else:
        setting = _packed_setting(data, int(labels), data_dir or default_data_dir())
    return setting._replace(labels_file=_resolved(labels_file))


def own_setting(code: str, labels: int, labels_file: Path | None = None) -> Setting:
    """The setting of images that a function from outside the package makes."""
    from crmatch.data.own_sets import own_arrays

    height, width, channels = own_arrays(code)["train_images"].shape[1:]
    setting = Setting(short_name(code), labels, min(height, width), channels, GENERIC, code=code)
    return setting._replace(labels_file=_resolved(labels_file))


def known_sets(data_dir: Path) -> list[str]:
    """Names of all data sets, including the packed files in `data_dir`."""
    return sorted({*NAMED_SETS, *(file.stem for file in data_dir.glob("*.npz"))})


def _folder_setting(folder: Path, labels_file: Path | None) -> Setting:
    from crmatch.data.folder.decode import choose_size
    from crmatch.data.folder.scan import scan_folder

    index = scan_folder(folder, labels_file)
    side, channels = choose_size([index.folder / path for path in index.paths])
    return Setting(index.folder.name, 0, side, channels, GENERIC, index.folder, _resolved(labels_file))


def _packed_setting(data: str, labels: int, data_dir: Path) -> Setting:
    from crmatch.data.packed import packed_image_shape, packed_path

    path = packed_path(data, data_dir)
    if not path.is_file():
        error = unknown_name_error("data set", data, known_sets(data_dir))
        raise RequestError(f"{error} (packed .npz sets are read from {data_dir})")
    height, width, channels = packed_image_shape(path)
    setting = Setting(data, labels, min(height, width), channels, GENERIC)
    defaults = BENCHMARKS[setting.stem] if setting.stem else GENERIC
    defaults = defaults._replace(split_rule="balanced")
    if setting.image_size <= 48:
        defaults = defaults._replace(network="wrn-28-2")
    return setting._replace(defaults=defaults)
