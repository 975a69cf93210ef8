"""Full disks, read-only and missing directories, damaged checkpoints and clocks that jump, each really done."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conftest import Command, Trained, tiny_command, tiny_spec
from crmatch.errors import StoppedError
from crmatch.runs.directory import RunDirectory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.training.checkpoint import checkpoint_files, load_checkpoint, save_checkpoint
from finished import result_of


def mount(folder: Path, *options: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("mounting a small disk takes root")
    if subprocess.run(["mount", *options, folder], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    folder = tmp_path / "disk"
    mount(folder, "-t", "tmpfs", "-o", "size=4m", "tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def stop_after(steps: int, data_dir: Path, out: Path) -> RunDirectory:
    workspace, spec = Workspace.at(out, data_dir), tiny_spec(data_dir)
    with pytest.raises(StoppedError):
        run(spec, workspace, stop=iter([False] * steps + [True]).__next__)
    return workspace.run_directory(spec)


@pytest.mark.process
@pytest.mark.parametrize("checkpoints", [0.0, 0.5, 1.5])
def test_a_full_disk_is_two_lines_and_with_space_the_run_ends_as_if_nothing_had_been(
    crmatch: Command, stripes: Path, trained: Trained, small_disk: Path, checkpoints: float
) -> None:
    """Full from the start; full in the middle of the first checkpoint, and of the second."""
    out = small_disk / "runs"
    size = max(file.stat().st_size for file in (trained.run / "checkpoint").iterdir())
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\1" * (shutil.disk_usage(small_disk).free - int(checkpoints * size) - 16384 * (checkpoints > 0)))
    outcome = crmatch(*tiny_command(stripes, out), "--json")
    assert outcome.code == 3, outcome.err
    assert "No space left on device" in outcome.err
    assert len(outcome.err.strip().splitlines()) == 2
    assert len(list(out.rglob("checkpoint/*.safetensors"))) == int(checkpoints)
    ballast.unlink()
    again = crmatch(*tiny_command(stripes, out), "--json")
    assert again.code == 0, again.err
    directory = Workspace.at(out, stripes).run_directory(tiny_spec(stripes))
    assert result_of(directory) == result_of(RunDirectory(trained.run))


@pytest.mark.process
def test_a_run_directory_that_becomes_read_only_is_two_lines_and_loses_nothing(
    crmatch: Command, stripes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    stop_after(9, stripes, out)
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file() and file.suffix != ".lock"}
    mount(out, "--bind", str(out))
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", out], check=True)
        outcome = crmatch(*tiny_command(stripes, out), "--json")
        assert outcome.code == 3, outcome.err
        assert "Read-only file system" in outcome.err
        assert len([line for line in outcome.err.splitlines() if line]) == 2
    finally:
        subprocess.run(["umount", "-l", out], check=True)
    assert {file: file.read_bytes() for file in before} == before
    assert crmatch(*tiny_command(stripes, out), "--json").code == 0


def test_a_data_directory_that_vanished_is_named_and_the_run_resumes_when_it_is_back(
    crmatch: Command, stripes: Path, tmp_path: Path
) -> None:
    out, away = tmp_path / "runs", tmp_path / "away"
    stops = iter([False] * 9 + [True])

    def stop() -> bool:
        if not away.exists():
            stripes.rename(away)  # in the middle of the run: it goes on with what it has read
        return next(stops)

    with pytest.raises(StoppedError, match="stopped after step 9 of 20"):
        run(tiny_spec(stripes), Workspace.at(out, stripes), stop=stop)
    outcome = crmatch(*tiny_command(stripes, out), "--json")
    assert outcome.code in (2, 3)
    assert "stripes" in outcome.err
    assert len(outcome.err.strip().splitlines()) == 2
    away.rename(stripes)
    assert crmatch(*tiny_command(stripes, out), "--json").code == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "unreadable"])
def test_a_damaged_checkpoint_falls_back_says_so_and_the_result_is_the_same(
    stripes: Path, trained: Trained, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = stop_after(10, stripes, tmp_path)
    newest, before = checkpoint_files(directory.checkpoints)
    content = newest.read_bytes()
    if damage == "unreadable":
        newest.unlink()
        newest.mkdir()
    else:
        newest.write_bytes(content[:-100] if damage == "cut" else content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    caplog.set_level(logging.INFO)
    run(tiny_spec(stripes), Workspace.at(tmp_path, stripes))
    for said in (f"{newest} is damaged", before.name, "after step 8\n"):
        assert said in caplog.text
    assert result_of(directory) == result_of(RunDirectory(trained.run))
    assert len(checkpoint_files(directory.checkpoints)) == 2
    assert newest.with_name(f"{newest.name}.damaged").exists()


def test_a_checkpoint_that_does_not_fit_the_run_is_refused(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    """Whole and with the right checksum, but of another network."""
    directory = stop_after(3, stripes, tmp_path)
    checkpoint = load_checkpoint(directory.checkpoints)
    assert checkpoint is not None
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if "stem" not in name} | {"other/x": torch.zeros(1)}
    save_checkpoint(directory.checkpoints, checkpoint._replace(tensors=tensors, step=7))
    outcome = crmatch(*tiny_command(stripes, tmp_path), "--json")
    assert outcome.code == 4
    assert "does not fit" in outcome.err


def test_clocks_that_jump_change_no_result_and_no_duration(
    stripes: Path, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter(range(0, -10_000_000, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    workspace = Workspace.at(tmp_path, stripes)
    record = run(tiny_spec(stripes), workspace)
    directory = workspace.run_directory(record.spec)
    assert result_of(directory) == result_of(RunDirectory(trained.run))
    assert 0 < record.seconds < 600
    assert all(line["images_per_second"] > 0 for line in directory.read_metrics())
