from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import Command
from crmatch.report import gallery


def test_the_gallery_shows_all_four_figures(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "gallery.png"
    outcome = crmatch("show", "augmentations", "--setting", "stripes@2", "--data-dir", stripes, "--out", out)
    assert outcome.code == 0, outcome.err
    assert str(out) in outcome.out
    with Image.open(out) as picture:
        assert picture.width > 11 * gallery.TILE
        assert picture.height > (14 + 6 + 6 + 2) * gallery.TILE


def test_a_picture_file_is_shown_and_any_other_file_refused(crmatch: Command, tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(file)
    assert crmatch("show", "augmentations", "--image", file, "--out", tmp_path / "g.png").code == 0
    assert gallery.read_picture(file).shape == (1, 3, 96, 96)
    file.write_text("no picture")
    outcome = crmatch("show", "augmentations", "--image", file, "--out", tmp_path / "g.png")
    assert outcome.code == 3
    assert "photo.jpg cannot be read" in outcome.err


def test_the_table_is_the_papers_and_an_unknown_variant_is_refused(crmatch: Command) -> None:
    rows = json.loads(crmatch("show", "augmentations", "--table", "--json").out)["rows"]
    ranges = {row["transformation"]: row["range"] for row in rows}
    assert ranges == {
        "autocontrast": "", "brightness": "[0.05, 0.95]", "color": "[0.05, 0.95]", "contrast": "[0.05, 0.95]",
        "equalize": "", "identity": "", "posterize": "[4, 8]", "rotate": "[-30, 30]", "sharpness": "[0.05, 0.95]",
        "shear_x": "[-0.3, 0.3]", "shear_y": "[-0.3, 0.3]", "solarize": "[0, 256]",
        "translate_x": "[-0.3, 0.3]", "translate_y": "[-0.3, 0.3]",
    }  # fmt: skip
    assert "Inverts all pixels" in crmatch("show", "augmentations", "--table").out
    outcome = crmatch("show", "augmentations", "--variant", "gogle", "--table")
    assert outcome.code == 2
    assert "Did you mean 'google'?" in outcome.err


@pytest.mark.parametrize("mirror", [True, False])
def test_weak_examples_mirror_only_if_the_set_allows_it(mirror: bool) -> None:
    ramp = torch.arange(0, 160, 10, dtype=torch.uint8).repeat(1, 3, 16, 1)
    views = gallery._views(ramp.expand(60, -1, -1, -1), mirror, "paper", strong=False)
    mirrored = int((views[:, 0, 8, 12] < views[:, 0, 8, 4]).sum())
    assert mirrored == 0 if not mirror else 15 < mirrored < 45
