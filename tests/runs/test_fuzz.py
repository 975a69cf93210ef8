"""Bytes flipped in every file the program reads: an answer or a message with its exit code, never a crash."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import QUICK, TINY, Command, Outcome, options, tiny_command
from crmatch.training.checkpoint import checkpoint_files

ROUNDS = 4 if QUICK else 12
EXPECTED = {0, 2, 3, 4}
SHORT = {**TINY, "plan.steps": 4, "plan.log_every": 1, "plan.evaluate_every": 2, "plan.checkpoint_every": 2}
ASSIGNMENTS = options({**SHORT, "method.rotation_images": 4})


def flipped(content: bytes, source: random.Random) -> bytes:
    """One to three bytes changed, or the end cut off, or bytes put in."""
    spoiled = bytearray(content)
    kind = source.randrange(4)
    if kind == 0:
        return bytes(spoiled[: source.randrange(len(spoiled))])
    for _ in range(source.randint(1, 3)):
        place = source.randrange(len(spoiled))
        if kind == 1:
            spoiled[place] ^= 1 << source.randrange(8)
        elif kind == 2:
            spoiled[place] = source.choice(b'\x00\xff09-"{}[]:,\n')
        else:
            spoiled[place:place] = source.randbytes(source.randint(1, 4))
    return bytes(spoiled)


def fuzz(call: Callable[[int], Outcome], files: Callable[[int], list[Path]], what: str, rounds: int = ROUNDS) -> None:
    """Spoil the files of a round, call, restore them; the answer is a result, or one message and its exit code."""
    source = random.Random(what)
    for turn in range(rounds):
        whole = {path: path.read_bytes() for path in files(turn)}
        for path, content in whole.items():
            path.write_bytes(flipped(content, source))
        code, _, err = call(turn)
        assert code in EXPECTED, f"{what}, round {turn}: code {code}\n{err}"
        assert "Traceback" not in err, what
        assert sum(line.startswith("crmatch: ") for line in err.splitlines()) == (code != 0), f"{what}\n{err}"
        for path, content in whole.items():
            path.write_bytes(content)


@pytest.fixture
def command(stripes: Path, tmp_path: Path) -> list[object]:
    return [*tiny_command(stripes, tmp_path / "runs"), "--json"]


@pytest.mark.process
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "record.json", "metrics.jsonl"])
def test_files_of_a_finished_run(crmatch: Command, finished: Path, stripes: Path, tmp_path: Path, name: str) -> None:
    picture = tmp_path / "picture.png"
    Image.fromarray(np.full((16, 16, 3), 90, np.uint8)).save(picture)
    readers: list[list[object]] = [
        ["evaluate", finished, "--data-dir", stripes, "--json"],
        ["predict", finished, picture, "--out", tmp_path / "predictions.csv"],
        ["report", finished, "--out", tmp_path / "report.html"],
    ]
    fuzz(lambda turn: crmatch(*readers[turn % len(readers)]), lambda turn: [finished / name], name)


def test_what_analyses_keep_in_a_run(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    keys = [assignment for assignment in ASSIGNMENTS if "plan.steps" not in assignment]
    place = ["--setting", "stripes@2", "--steps", 2, "--data-dir", stripes, "--out", tmp_path / "runs"]
    table: list[object] = ["table", "equivariance", *place, *keys]
    assert crmatch(*table).code == 0
    names = ("translation", "scaling", "rotation", "color jitter", "strong against weak")
    probe = next((tmp_path / "runs").rglob("record.json")).with_name("probe.json")
    probe.write_text(json.dumps({name: {"mean": 12.5, "std": 0.5, "n": 10} for name in names}))
    fuzz(lambda turn: crmatch(*table), lambda turn: [probe], "probe.json", 2 * ROUNDS)


@pytest.mark.parametrize("name", ["checkpoint", "spec.json", "split.json", "metrics.jsonl", "record.json"])
def test_files_of_a_run_that_is_resumed(
    crmatch: Command, command: list[object], finished: Path, tmp_path: Path, name: str
) -> None:
    if name != "record.json":
        (finished / "record.json").unlink()
    kept = tmp_path / "kept"
    shutil.copytree(finished, kept)

    def files(turn: int) -> list[Path]:
        shutil.rmtree(finished)
        shutil.copytree(kept, finished)
        return checkpoint_files(finished / "checkpoint")[: 1 + turn % 2] if name == "checkpoint" else [finished / name]

    fuzz(lambda turn: crmatch(*command), files, name)


def test_the_packed_set(crmatch: Command, command: list[object], stripes: Path, tmp_path: Path) -> None:
    def call(turn: int) -> Outcome:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        return crmatch(*command)

    fuzz(call, lambda turn: [stripes / "stripes.npz"], "packed set", 2 * ROUNDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_pixels = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    for place in ("labeled/cat", "labeled/dog", "unlabeled"):
        (folder / place).mkdir(parents=True)
        for number, kind in enumerate(("png", "jpg", "gif", "bmp")):
            pixels = random_pixels.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{number}.{kind}")
    (folder / "labels.csv").write_text("path,label\nunlabeled/0.png,cat\nunlabeled/1.jpg,cat\n")
    return folder


@pytest.mark.process
@pytest.mark.parametrize("what", ["labels.csv", "pictures", "cache"])
def test_own_pictures_their_labels_and_their_cache(crmatch: Command, folder: Path, tmp_path: Path, what: str) -> None:
    keys = [key for key in ASSIGNMENTS if "rotation_images" not in key]
    places = ["--labels", folder / "labels.csv", "--data-dir", tmp_path / "data"]
    arguments = ["train", folder, *places, "--image-size", 16, "--no-baseline", *keys, "--json"]
    pictures = sorted(path for path in folder.rglob("*") if path.suffix in (".png", ".jpg", ".gif", ".bmp"))
    assert crmatch(*arguments, "--out", tmp_path / "first").code == 0

    def files(turn: int) -> list[Path]:
        if what == "cache":
            return [path for path in (tmp_path / "data").rglob("*") if path.is_file() and path.stat().st_size]
        return [folder / "labels.csv"] if what == "labels.csv" else random.Random(turn).sample(pictures, 4)

    fuzz(lambda turn: crmatch(*arguments, "--out", tmp_path / f"runs{turn}"), files, what, ROUNDS // 2)


def test_a_config_file_with_any_bytes(crmatch: Command, finished: Path, stripes: Path) -> None:
    arguments = ["show", "config", "stripes@2", "--data-dir", stripes, "--config", finished / "spec.json", "--json"]
    fuzz(lambda turn: crmatch(*arguments), lambda turn: [finished / "spec.json"], "config", 2 * ROUNDS)
