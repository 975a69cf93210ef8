"""Data sets by name: settings, packed sets, digits, and the checks on images and labels."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from conftest import write_packed
from crmatch.data.images import ImageSet, resize
from crmatch.data.load import load_data
from crmatch.data.settings import parse_setting
from crmatch.errors import DataError, RequestError

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "results" / "records" / "digits@4"


def test_digits_are_those_of_scikit_learn_with_500_fixed_test_images() -> None:
    data = load_data("digits")
    assert data.test is not None
    assert data.train.images.shape == (1297, 1, 16, 16)
    assert data.test.images.shape == (500, 1, 16, 16)
    found = {}
    for part in (data.train, data.test):
        found |= {image.numpy().tobytes(): label for image, label in zip(part.images, part.labels.tolist(), strict=True)}
    originals, labels = load_digits(return_X_y=True)
    for original, label in zip(originals.reshape(-1, 8, 8), labels.tolist(), strict=True):
        picture = Image.fromarray(np.rint(original * 255 / 16).astype(np.uint8))
        assert found[picture.resize((16, 16), Image.Resampling.LANCZOS).tobytes()] == label
    assert len(found) == 1797, "no image is in both parts"
    assert torch.bincount(data.test.labels).min() >= 35


def test_digits_are_the_images_of_the_committed_records() -> None:
    train = load_data("digits").train
    fingerprints = {json.loads(path.read_text()).get("data_fingerprint") for path in RECORDS.glob("*-seed0.json")}
    assert fingerprints == {train.fingerprint}


def test_digits_are_packed_on_first_use_and_work_without_a_writable_data_directory(tmp_path: Path) -> None:
    first = load_data("digits", tmp_path / "data").train
    assert (tmp_path / "data" / "digits.npz").is_file()
    (tmp_path / "file").write_text("no directory can be made below a file")
    for data_dir in (tmp_path / "data", tmp_path / "file" / "data"):
        again = load_data("digits", data_dir).train
        assert torch.equal(again.images, first.images)
        assert torch.equal(again.labels, first.labels)


@pytest.mark.process
def test_two_processes_that_use_digits_for_the_first_time_at_once_agree(tmp_path: Path) -> None:
    code = "import sys, pathlib; from crmatch.data.load import load_data; "
    code += "print(load_data('digits', pathlib.Path(sys.argv[1])).train.fingerprint)"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    fingerprints = {process.communicate()[0].strip() for process in processes}
    assert fingerprints == {load_data("digits").train.fingerprint}
    assert {file.name for file in tmp_path.iterdir()} == {"digits.npz", "digits.json", ".digits.npz.lock"}


def test_a_packed_set_comes_back_as_it_was_written(stripes: Path) -> None:
    data = load_data("stripes", stripes)
    with np.load(stripes / "stripes.npz") as archive:
        assert np.array_equal(data.train.images.permute(0, 2, 3, 1).numpy(), archive["train_images"])
        assert data.train.labels.tolist() == archive["train_labels"].tolist()
    assert data.train.class_names == ("stripe 0", "stripe 1", "stripe 2")


def test_unlabeled_images_join_the_training_set_without_a_label(tmp_path: Path) -> None:
    extra = np.full((5, 16, 16, 3), 7, np.uint8)
    write_packed(tmp_path / "more.npz", unlabeled_images=extra)
    train = load_data("more", tmp_path).train
    assert len(train) == 36 + 5
    assert train.labels[-5:].tolist() == [-1] * 5


BROKEN: dict[str, dict[str, Any] | Callable[[bytes], bytes]] = {
    "text": lambda content: b"this is not an archive",
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-3000],
    "flipped": lambda content: content[:4000] + bytes([content[4000] ^ 0xFF]) + content[4001:],
    "pickled": {"train_labels": np.array([{"a": 1}], dtype=object)},
    "missing key": {"test_labels": None},
    "float images": {"train_images": np.zeros((36, 16, 16, 3), np.float32)},
    "flat images": {"train_images": np.zeros((36, 768), np.uint8)},
    "four channels": {"train_images": np.zeros((36, 16, 16, 4), np.uint8)},
    "too few labels": {"train_labels": np.zeros(7, np.int64)},
    "label too large": {"train_labels": np.full(36, 3)},
    "label too small": {"train_labels": np.full(36, -2)},
    "text labels": {"train_labels": np.array(["a"] * 36)},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_packed_set_is_named_in_at_most_two_lines(tmp_path: Path, kind: str) -> None:
    change, path = BROKEN[kind], tmp_path / "bad.npz"
    write_packed(path, **({} if callable(change) else change))
    if callable(change):
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=r"bad\.npz") as failure:
        load_data("bad", tmp_path)
    assert len(str(failure.value).splitlines()) <= 2


def test_resize_equals_pillow_and_crops_the_center() -> None:
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 20, 30), dtype=np.uint8))
    resized = resize(images, 10)
    for image, result in zip(images, resized, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        expected = np.asarray(picture.resize((15, 10), Image.Resampling.LANCZOS))[:, 2:12]
        assert np.array_equal(result.permute(1, 2, 0).numpy(), expected)
    assert resize(resized, 10) is resized


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(3, 16, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "uint8"),
        (torch.zeros(3, 1, 16, 16), torch.zeros(3, dtype=torch.int64), "uint8"),
        (torch.zeros(3, 1, 4, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "8 pixels"),
        (torch.zeros(3, 1, 16, 16, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"shape \(3,\)"),
        (torch.zeros(3, 1, 16, 16, dtype=torch.uint8), torch.tensor([0, 1, 2]), "2 classes"),
        (torch.zeros(3, 1, 16, 16, dtype=torch.uint8), torch.tensor([0, -3, 0]), "2 classes"),
    ],
)
def test_images_and_labels_are_checked(images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageSet(images, labels, ("a", "b"))


@pytest.mark.parametrize(
    ("text", "data", "labels", "size", "mirror", "network", "decay"),
    [
        ("cifar10@4", "cifar10", 4, 32, True, "wrn-28-2", 5e-4),
        ("CIFAR100@25", "cifar100", 25, 32, True, "wrn-28-8", 1e-3),
        ("svhn@100", "svhn", 100, 32, False, "wrn-28-2", 5e-4),
        ("stl10@100", "stl10", 100, 96, True, "wrn-37-2", 5e-4),
        ("miniimagenet@40", "mini_imagenet", 40, 84, True, "resnet-18", 5e-4),
        ("digits@4", "digits", 4, 16, False, "wrn-28-2", 5e-4),
        ("svhn_small@25", "svhn_small", 25, 20, False, "wrn-28-2", 5e-4),
        ("cifar100_small@4", "cifar100_small", 4, 20, True, "wrn-28-2", 1e-3),
        ("other@4", "other", 4, 20, True, "wrn-28-2", 5e-4),
    ],
)
def test_a_setting_means_what_the_paper_and_its_stem_say(
    tmp_path: Path, text: str, data: str, labels: int, size: int, mirror: bool, network: str, decay: float
) -> None:
    for name in ("svhn_small", "cifar100_small", "other"):
        write_packed(tmp_path / f"{name}.npz", side=20)
    setting = parse_setting(text, tmp_path)
    assert (setting.data, setting.labels_per_class, setting.image_size) == (data, labels, size)
    assert (setting.defaults.mirror, setting.defaults.network, setting.defaults.weight_decay) == (mirror, network, decay)
    assert setting.is_benchmark == (data in {"cifar10", "cifar100", "svhn", "stl10", "mini_imagenet"})


@pytest.mark.parametrize("text", ["digits", "digits@", "digits@0", "digits@-4", "digits@four", "@4"])
def test_a_wrong_setting_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match=r"(is not a setting|unknown data set)"):
        parse_setting(text)
