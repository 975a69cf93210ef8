"""Exported models predict what the model predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Command
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
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert program(torch.zeros(3, 1, 16, 16, dtype=torch.uint8)).sum(dim=1).tolist() == pytest.approx([1, 1, 1])


def test_the_model_card_names_data_method_error_and_n(digits_run: Path) -> None:
    card = (digits_run / "README.md").read_text()
    for words in ("CR-Match", "digits@4: 40 labeled, 1,257 unlabeled images", "n = 500 test images", "arXiv 2112.05825"):
        assert words in card


def test_a_model_directory_is_self_contained(digits_run: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((digits_run / name).read_bytes())
    images = torch.zeros(2, 1, 16, 16, dtype=torch.uint8)
    assert torch.equal(load(tmp_path).predict_probabilities(images), load(digits_run).predict_probabilities(images))
