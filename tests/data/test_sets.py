from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from conftest import SHARED_DATA, write_packed
from crmatch.data.images import ImageSet, resize
from crmatch.data.load import _read_table, load_data
from crmatch.data.settings import parse_setting
from crmatch.errors import DataError, RequestError


def test_digits_are_the_real_ones_with_500_fixed_test_images() -> None:
    data = load_data("digits")
    assert data.test is not None
    assert data.train.images.shape == (1297, 1, 16, 16)
    assert data.test.images.shape == (500, 1, 16, 16)
    original = Image.fromarray(np.rint(load_digits().images[0] * 255 / 16).astype(np.uint8))
    enlarged = torch.from_numpy(np.array(original.resize((16, 16), Image.Resampling.LANCZOS)))
    everything = torch.cat([data.train.images, data.test.images])[:, 0]
    assert (everything == enlarged).flatten(1).all(dim=1).sum() == 1
    assert torch.bincount(data.test.labels).min() >= 35


def test_digits_are_read_as_scikit_learn_reads_them_without_importing_it() -> None:
    images, labels = load_digits(return_X_y=True)
    table = _read_table()
    assert np.array_equal(table[:, :-1], images)
    assert np.array_equal(table[:, -1], labels)


def test_digits_do_not_share_an_image_between_train_and_test() -> None:
    data = load_data("digits")
    assert data.test is not None
    pool = {image.numpy().tobytes() for image in data.train.images}
    assert not any(image.numpy().tobytes() in pool for image in data.test.images)


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


def broken(folder: Path, kind: str) -> None:
    path = folder / "bad.npz"
    if kind == "text":
        path.write_text("this is no archive")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        write_packed(path)
        path.write_bytes(path.read_bytes()[:-3000])
    elif kind == "flipped":
        write_packed(path)
        content = bytearray(path.read_bytes())
        content[4000] ^= 0xFF
        path.write_bytes(bytes(content))
    elif kind == "pickled":
        write_packed(path, train_labels=np.array([{"a": 1}], dtype=object))
    elif kind == "missing key":
        write_packed(path, test_labels=None)
    elif kind == "float images":
        write_packed(path, train_images=np.zeros((36, 16, 16, 3), np.float32))
    elif kind == "flat images":
        write_packed(path, train_images=np.zeros((36, 768), np.uint8))
    elif kind == "four channels":
        write_packed(path, train_images=np.zeros((36, 16, 16, 4), np.uint8))
    elif kind == "too few labels":
        write_packed(path, train_labels=np.zeros(7, np.int64))
    elif kind == "label too large":
        write_packed(path, train_labels=np.full(36, 3))
    elif kind == "text labels":
        write_packed(path, train_labels=np.array(["a"] * 36))


BROKEN = (
    "text", "empty", "truncated", "flipped", "pickled", "missing key", "float images", "flat images", "four channels",
    "too few labels", "label too large", "text labels",
)  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_packed_set_is_named_in_at_most_two_lines(tmp_path: Path, kind: str) -> None:
    broken(tmp_path, kind)
    with pytest.raises(DataError, match=r"bad\.npz") as failure:
        load_data("bad", tmp_path)
    assert len(str(failure.value).splitlines()) <= 2


def test_a_missing_packed_set_lists_those_that_are_there(stripes: Path) -> None:
    with pytest.raises(DataError, match=r"no cifar10\.npz .*\nFound there: stripes"):
        load_data("cifar10", stripes)


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
        (torch.zeros(3, 1, 16, 16, dtype=torch.uint8), torch.tensor([0, -2, 0]), "2 classes"),
    ],
)
def test_images_and_labels_are_checked_at_the_door(images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
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
def test_what_is_no_setting_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(RequestError, match=r"(is not a setting|unknown data set)"):
        parse_setting(text)


def test_an_unknown_data_set_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"unknown data set 'cifr10'\.\nDid you mean 'cifar10'\?"):
        parse_setting("cifr10@4", tmp_path)


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the small real image sets are not on this machine")
@pytest.mark.parametrize("name", ["cifar10_small", "eurosat_small"])
def test_the_small_real_sets_load_with_balanced_classes(name: str) -> None:
    data = load_data(name, SHARED_DATA)
    assert data.test is not None
    assert data.train.images.shape[1:] == (3, 32, 32)
    assert len(torch.bincount(data.train.labels).unique()) == 1
