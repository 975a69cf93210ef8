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

from conftest import TINY, Outcome
from crmatch.training.checkpoint import checkpoint_files

Command = Callable[..., Outcome]
ROUNDS = 12
EXPECTED = {0, 2, 3, 4}
SHORT = {**TINY, "plan.steps": 4, "plan.log_every": 1, "plan.evaluate_every": 2, "plan.checkpoint_every": 2}
ASSIGNMENTS = [f"--set={key}={value}" for key, value in {**SHORT, "method.rotation_images": 4}.items()]


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


def check(outcome: Outcome, what: str) -> None:
    assert outcome.code in EXPECTED, f"{what}: code {outcome.code}\n{outcome.err}"
    assert "Traceback" not in outcome.err, what
    if outcome.code:
        assert outcome.err.strip(), what
        assert sum(line.startswith("crmatch: ") for line in outcome.err.splitlines()) == 1, f"{what}\n{outcome.err}"


@pytest.fixture
def command(stripes: Path, tmp_path: Path) -> list[object]:
    return ["train", "stripes@2", "--data-dir", stripes, "--out", tmp_path / "runs", *ASSIGNMENTS, "--json"]


@pytest.fixture
def finished(crmatch: Command, command: list[object]) -> Path:
    outcome = crmatch(*command)
    assert outcome.code == 0, outcome.err
    return Path(json.loads(outcome.out)["run"])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "record.json", "metrics.jsonl"])
def test_files_of_a_finished_run(crmatch: Command, finished: Path, stripes: Path, tmp_path: Path, name: str) -> None:
    source = random.Random(name)
    content = (finished / name).read_bytes()
    picture = tmp_path / "picture.png"
    Image.fromarray(np.full((16, 16, 3), 90, np.uint8)).save(picture)
    readers: list[list[object]] = [
        ["evaluate", finished, "--data-dir", stripes, "--json"],
        ["predict", finished, picture, "--out", tmp_path / "predictions.csv"],
        ["report", finished, "--out", tmp_path / "report.html"],
    ]
    for turn in range(ROUNDS):
        (finished / name).write_bytes(flipped(content, source))
        check(crmatch(*readers[turn % len(readers)]), f"{name}, round {turn}")


def test_what_analyses_keep_in_a_run(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    keys = [assignment for assignment in ASSIGNMENTS if "plan.steps" not in assignment]
    place = ["--setting", "stripes@2", "--steps", 2, "--data-dir", stripes, "--out", tmp_path / "runs"]
    table: list[object] = ["table", "equivariance", *place, *keys]
    assert crmatch(*table).code == 0
    names = ("translation", "scaling", "rotation", "color jitter", "strong against weak")
    content = json.dumps({name: {"mean": 12.5, "std": 0.5, "n": 10} for name in names}).encode()
    run = next((tmp_path / "runs").rglob("record.json")).parent
    source = random.Random(2)
    for turn in range(2 * ROUNDS):
        (run / "probe.json").write_bytes(flipped(content, source))
        check(crmatch(*table), f"probe.json, round {turn}")


@pytest.mark.parametrize("name", ["checkpoint", "spec.json", "split.json", "metrics.jsonl", "record.json"])
def test_files_of_a_run_that_is_continued(
    crmatch: Command, command: list[object], finished: Path, tmp_path: Path, name: str
) -> None:
    source = random.Random(name)
    if name != "record.json":
        (finished / "record.json").unlink()
    kept = tmp_path / "kept"
    shutil.copytree(finished, kept)
    for turn in range(ROUNDS):
        shutil.rmtree(finished)
        shutil.copytree(kept, finished)
        files = checkpoint_files(finished / "checkpoint") if name == "checkpoint" else [finished / name]
        for file in files[: 1 + turn % 2]:
            file.write_bytes(flipped(file.read_bytes(), source))
        check(crmatch(*command), f"{name}, round {turn}")


def test_the_packed_set(crmatch: Command, command: list[object], stripes: Path, tmp_path: Path) -> None:
    source = random.Random(1)
    path = stripes / "stripes.npz"
    content = path.read_bytes()
    for turn in range(2 * ROUNDS):
        path.write_bytes(flipped(content, source))
        check(crmatch(*command), f"packed set, round {turn}")
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_pixels = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    for place in ("labeled/cat", "labeled/dog", "unlabeled"):
        (folder / place).mkdir(parents=True)
        for number in range(4):
            pixels = random_pixels.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{number}.{('png', 'jpg', 'gif', 'bmp')[number]}")
    lines = ["path,label", *(f"unlabeled/{number}.{kind},cat" for number, kind in enumerate(("png", "jpg")))]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("what", ["labels.csv", "pictures", "cache"])
def test_own_pictures_their_labels_and_their_cache(crmatch: Command, folder: Path, tmp_path: Path, what: str) -> None:
    source = random.Random(what)
    labels = folder / "labels.csv"
    keys = [key for key in ASSIGNMENTS if "rotation_images" not in key]
    places = ["--labels", labels, "--data-dir", tmp_path / "data"]
    arguments = ["train", folder, *places, "--image-size", 16, "--no-baseline", *keys]
    pictures = sorted(path for path in folder.rglob("*") if path.suffix in (".png", ".jpg", ".gif", ".bmp"))
    good = {path: path.read_bytes() for path in (labels, *pictures)}
    assert crmatch(*arguments, "--out", tmp_path / "first", "--json").code == 0
    for turn in range(ROUNDS // 2):
        targets = [labels] if what == "labels.csv" else source.sample(pictures, 4)
        if what == "cache":
            targets = [path for path in (tmp_path / "data").rglob("*") if path.is_file() and path.stat().st_size]
        for path in targets:
            path.write_bytes(flipped(good.get(path) or path.read_bytes(), source))
        check(crmatch(*arguments, "--out", tmp_path / f"runs{turn}", "--json"), f"{what}, round {turn}")
        for path, content in good.items():
            if path.read_bytes() != content:
                path.write_bytes(content)


def test_a_config_file_with_any_bytes(crmatch: Command, finished: Path, stripes: Path, tmp_path: Path) -> None:
    source = random.Random(2)
    content = (finished / "spec.json").read_bytes()
    for turn in range(2 * ROUNDS):
        (tmp_path / "keys.json").write_bytes(flipped(content, source))
        arguments = ["stripes@2", "--data-dir", stripes, "--config", tmp_path / "keys.json", "--json"]
        check(crmatch("show", "config", *arguments), f"config, round {turn}")
