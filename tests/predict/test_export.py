"""Exported models predict what the model predicts."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import Command, Trained
from crmatch.data.images import resize
from crmatch.data.load import load_data
from crmatch.predict.export import export_model
from crmatch.predict.model import load


@pytest.mark.parametrize("form", ["torch", "onnx"])
def test_exports_agree_with_the_model_on_500_real_images(digits_run: Path, tmp_path: Path, form: Any) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime", reason="needs the extra onnx")
        pytest.importorskip("onnxscript", reason="needs the extra onnx")
    model = load(digits_run)
    test = load_data("digits").test
    assert test is not None
    assert export_model(model, form, tmp_path / "model", resize(test.images, model.image_size)) < 1e-4


def test_the_command_says_how_exact_the_export_is(crmatch: Command, digits_run: Path, tmp_path: Path) -> None:
    outcome = crmatch("export", digits_run, "--format", "torch", "--out", tmp_path / "model.pt2")
    assert outcome.code == 0, outcome.err
    assert "largest difference" in outcome.out
    assert "500 images" in outcome.out
    about = {"crmatch.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=about).module()
    assert json.loads(json.loads(about["crmatch.json"])["class_names"]) == [str(digit) for digit in range(10)]
    assert program(torch.zeros(3, 1, 16, 16, dtype=torch.uint8)).sum(dim=1).tolist() == pytest.approx([1, 1, 1])


WITHOUT_CRMATCH = (
    "import runpy, sys; sys.modules |= {'crmatch': None, 'torch': None}; del sys.argv[0];"
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.mark.process
def test_use_model_gives_the_same_classes_and_confidences_without_crmatch(
    crmatch: Command, trained: Trained, tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    random, modes, paths = np.random.default_rng(0), ("RGB", "RGBA", "L", "P", "CMYK"), []
    for number in range(60):  # odd sizes and modes, every third one turned by EXIF
        height, width = random.integers(9, 90, 2)
        picture = Image.fromarray(random.integers(0, 256, (height, width, 4), np.uint8)).convert("RGBA")
        picture = picture.convert(mode) if (mode := modes[number % 5]) != "RGBA" else picture
        exif = Image.Exif()
        exif[0x0112] = 6 if number % 3 == 0 else 1
        paths.append(tmp_path / f"{number}.{'jpg' if mode in ('RGB', 'CMYK') else 'png'}")
        picture.save(paths[-1], exif=exif)
    outcome = crmatch("export", trained.run, "--format", "onnx", "--out", tmp_path / "m.onnx", "--data-dir", trained.data_dir)
    assert outcome.code == 0, outcome.err
    model = load(trained.run)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    assert session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    about = session.get_modelmeta().custom_metadata_map
    assert about["calibration"].startswith(f"temperature {model.calibration.temperature:.2f}, fitted on the test set")
    assert "center crop" in about["resize"]
    files = [tmp_path / "use_model.py", tmp_path / "m.onnx", tmp_path / "gone.jpg", *paths]
    command = [sys.executable, "-c", WITHOUT_CRMATCH, *files]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "gone.jpg" in printed.stderr
    rows = list(csv.reader(printed.stdout.splitlines()))
    expected = model.predict(paths)
    assert [row[:2] for row in rows] == [[str(path), one.class_name] for path, one in zip(paths, expected, strict=True)]
    assert [float(row[2]) for row in rows] == pytest.approx([one.confidence for one in expected], abs=2e-4)


def test_the_model_card_names_data_method_error_and_n(digits_run: Path) -> None:
    card = (digits_run / "README.md").read_text()
    data = "digits@4: 40 labeled, 1,257 unlabeled images"
    for words in ("CR-Match", data, "n = 500 test images", "95 % interval", "accuracy", "arXiv 2112.05825"):
        assert words in card


def test_a_model_directory_is_self_contained(digits_run: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((digits_run / name).read_bytes())
    images = torch.zeros(2, 1, 16, 16, dtype=torch.uint8)
    assert torch.equal(load(tmp_path).predict_probabilities(images), load(digits_run).predict_probabilities(images))
