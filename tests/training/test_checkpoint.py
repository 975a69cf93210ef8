from __future__ import annotations

from pathlib import Path

import pytest
import torch

from crmatch.errors import ResumeError
from crmatch.training.checkpoint import Checkpoint, checkpoint_files, load_checkpoint, save_checkpoint


def checkpoint(step: int) -> Checkpoint:
    tensors = {"a": torch.full((3, 2), float(step), dtype=torch.float64), "b": torch.tensor(step), "c": torch.rand(2, 3).t()}
    return Checkpoint(step, tensors, {"seconds": 1.5, "names": ["x"]})


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = checkpoint(7)
    save_checkpoint(tmp_path, saved)
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.values) == (7, saved.values)
    assert all(torch.equal(tensor, loaded.tensors[name]) for name, tensor in saved.tensors.items())


def test_the_newest_counts_and_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        save_checkpoint(tmp_path, checkpoint(step))
    assert [file.name[:13] for file in checkpoint_files(tmp_path)] == ["step-00000100", "step-00000010"]
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.step == 100


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_damage_is_noticed_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    for step in (5, 10):
        save_checkpoint(tmp_path, checkpoint(step))
    newest, oldest = checkpoint_files(tmp_path)

    def spoil(file: Path) -> None:
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[-1] ^= 4
        file.write_bytes({"truncate": content[:-5], "flip": content, "empty": b""}[damage])

    spoil(newest)
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.step == 5
    spoil(oldest)
    with pytest.raises(ResumeError, match=r"all checkpoints .* are damaged"):
        load_checkpoint(tmp_path)


def test_nothing_saved_is_no_error(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "never") is None
