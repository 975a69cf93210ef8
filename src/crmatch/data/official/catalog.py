"""The data sets that `crmatch data fetch` knows: their files, checksums and contents. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class SourceFile(NamedTuple):
    """One official file."""

    name: str
    urls: tuple[str, ...]  # mirrors, the official one first
    size: int
    md5: str
    sha256: str

    @property
    def checksums(self) -> dict[str, str]:
        """Digest by algorithm."""
        return {"md5": self.md5, "sha256": self.sha256}


class SourceSet(NamedTuple):
    """A data set as its authors publish it."""

    title: str
    reader: str  # key of `fetch.READERS`
    files: tuple[SourceFile, ...]  # empty if there is no public file: the set is read from `--from`, or is `bundled`
    counts: Mapping[str, int]  # images per part of the packed set; `fold`: labeled images per fold
    classes: int
    side: int
    homepage: str
    license: str
    bundled: bool = False  # whether the images come with an installed package; they are packed on first use

    @property
    def download_size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def packed_size(self) -> int:
        """Bytes of all pixels."""
        return sum(self.counts.get(part, 0) for part in PARTS) * self.side**2 * 3


PARTS = ("train", "test", "unlabeled")
_KRIZ, _HOUSENUMBERS = "https://www.cs.toronto.edu/~kriz", "http://ufldl.stanford.edu/housenumbers"
_CIFAR_LICENSE = "no license stated; cite Krizhevsky 2009"
_SVHN_LICENSE = "non-commercial use only; cite Netzer et al. 2011"
_CIFAR10 = SourceFile(
    "cifar-10-binary.tar.gz",
    (f"{_KRIZ}/cifar-10-binary.tar.gz",
     "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/cifar-10-binary.tar.gz"),
    170_052_171, "c32a1d4ab5d03f1284b67883e8d87530", "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)  # fmt: skip
_CIFAR100 = SourceFile(
    "cifar-100-binary.tar.gz", (f"{_KRIZ}/cifar-100-binary.tar.gz",),
    168_513_733, "03b5dce01913d631647c71ecec9e9cb8", "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)  # fmt: skip
_SVHN_TRAIN = SourceFile(
    "train_32x32.mat", (f"{_HOUSENUMBERS}/train_32x32.mat",),
    182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373", "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
)  # fmt: skip
_SVHN_TEST = SourceFile(
    "test_32x32.mat", (f"{_HOUSENUMBERS}/test_32x32.mat",),
    64_275_384, "eb5a983be6a315427106f1b164d9cef3", "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
)  # fmt: skip
_SVHN_EXTRA = SourceFile(
    "extra_32x32.mat", (f"{_HOUSENUMBERS}/extra_32x32.mat",),
    1_329_278_602, "a93ce644f1a588dc4d68dda5feec44a7", "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3",
)  # fmt: skip
_STL10 = SourceFile(
    "stl10_binary.tar.gz",
    ("http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
     "https://cs.stanford.edu/~acoates/stl10/stl10_binary.tar.gz"),
    2_640_397_119, "91f7769df0f17e558f3565bffb0c7dfb", "f31fd99273a1acb8609c8db427cebb1de3f71de77758cdc0e22956e1289b9866",
)  # fmt: skip
CATALOG: dict[str, SourceSet] = {
    "cifar10": SourceSet(
        "CIFAR-10", "cifar", (_CIFAR10,), {"train": 50_000, "test": 10_000}, 10, 32, f"{_KRIZ}/cifar.html", _CIFAR_LICENSE
    ),
    "cifar100": SourceSet(
        "CIFAR-100, fine labels", "cifar", (_CIFAR100,), {"train": 50_000, "test": 10_000}, 100, 32,
        f"{_KRIZ}/cifar.html", _CIFAR_LICENSE,
    ),
    "svhn": SourceSet(
        "SVHN, cropped digits", "svhn", (_SVHN_TRAIN, _SVHN_TEST), {"train": 73_257, "test": 26_032}, 10, 32,
        f"{_HOUSENUMBERS}/", _SVHN_LICENSE,
    ),
    "svhn_extra": SourceSet(
        "SVHN with the extra images for training", "svhn", (_SVHN_TRAIN, _SVHN_TEST, _SVHN_EXTRA),
        {"train": 604_388, "test": 26_032}, 10, 32, f"{_HOUSENUMBERS}/", _SVHN_LICENSE,
    ),
    "stl10": SourceSet(
        "STL-10", "stl10", (_STL10,), {"train": 5_000, "test": 8_000, "unlabeled": 100_000, "fold": 1_000}, 10, 96,
        "https://cs.stanford.edu/~acoates/stl10/", "images from ImageNet, under its terms; cite Coates et al. 2011",
    ),
    "mini_imagenet": SourceSet(
        "mini-ImageNet", "mini_imagenet", (), {"train": 50_000, "test": 10_000}, 100, 84,
        "https://github.com/twitter-research/meta-learning-lstm",
        "images from ImageNet, research use under its terms; cite Vinyals et al. 2016, Ravi and Larochelle 2017",
    ),
    "digits": SourceSet(
        "handwritten digits of scikit-learn", "digits", (), {"train": 1_297, "test": 500}, 10, 16,
        "https://archive.ics.uci.edu/dataset/80", "CC BY 4.0; cite Alpaydin and Kaynak 1998", bundled=True,
    ),
}  # fmt: skip
