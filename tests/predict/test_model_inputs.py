"""What `Model.predict` and `predict_probabilities` accept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from crmatch.errors import DataError
from crmatch.predict.model import load


@pytest.fixture(scope="module")
def model(trained):
    return load(trained.run)


@pytest.fixture(scope="module")
def pixels(model):
    shape = (3, model.image_size, model.image_size, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_all_layouts_and_types_give_the_same_probabilities(model, pixels):
    expected = model.predict_probabilities(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    pictures = [Image.fromarray(image) for image in pixels]
    for images in (pixels, pixels.transpose(0, 3, 1, 2), pixels / 255, torch.from_numpy(pixels), pictures):
        assert torch.equal(model.predict_probabilities(images), expected)
    torch.testing.assert_close(model.predict_probabilities(pictures[1])[0], expected[1])
    first = model.predict(pixels)[0]
    assert first.confidence == pytest.approx(expected[0].max().item())
    assert model.class_names.index(first.class_name) == int(expected[0].argmax())


def test_pictures_are_turned_upright_and_converted_to_the_channels_of_the_model(model):
    gray = np.random.default_rng(1).integers(0, 256, (16, 16), dtype=np.uint8)
    turned = Image.fromarray(np.rot90(gray))
    turned.getexif()[0x0112] = 6  # to be turned by 90 degrees clockwise
    upright = np.repeat(gray[None, :, :, None], 3, axis=3)
    assert torch.equal(model.predict_probabilities(turned), model.predict_probabilities(upright))


@pytest.mark.process
def test_paths_are_read_and_unreadable_ones_are_named(model, pixels, tmp_path):
    Image.fromarray(pixels[0]).save(tmp_path / "one.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    assert model.predict(tmp_path / "one.png") == model.predict(pixels[:1])
    with pytest.raises(DataError, match=r"bad\.png"):
        model.predict([tmp_path / "one.png", str(tmp_path / "bad.png")])


@pytest.mark.parametrize(
    ("images", "told"),
    [
        (np.zeros((2, 16, 16, 1), np.uint8), "3 channels"),
        (np.full((2, 16, 16, 3), 7.0), "floats from 0 to 1"),
        (np.zeros((2, 16, 16, 3), np.int64), "int64"),
        (np.zeros((16, 16), np.uint8), "shape"),
        ([], "no pictures"),
        ([1, 2], "no pictures"),
    ],
)
def test_other_inputs_are_explained(model, images, told):
    with pytest.raises(DataError, match=told):
        model.predict(images)
