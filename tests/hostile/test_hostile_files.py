"""What mutated files of strangers (fuzz.py) have found, one test each, and some hundred mutations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
import safetensors.torch
import torch

from conftest import Command, tiny_command, write_packed
from crmatch.atomic_files import checksum, read_file, remove_leftovers, write_file
from crmatch.data.packed import read_packed
from crmatch.errors import DataError
from crmatch.networks.build import build_network, weight_shapes
from crmatch.networks.config import NETWORKS, NamedNetwork
from crmatch.networks.pretrained import timm
from crmatch.predict import model
from crmatch.runs.directory import RunDirectory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.training.execution import Execution
from finished import write_photos

TESTS = Path(__file__).resolve().parents[1]


def change(file: Path, **values: Any) -> None:
    """Change keys of a JSON file; `a__b` is b in a."""
    content = json.loads(file.read_text())
    for key, value in values.items():
        *sections, leaf = key.split("__")
        inner = content
        for section in sections:
            inner = inner[section]
        inner[leaf] = value
    file.write_text(json.dumps(content))


@pytest.mark.process
def test_sixty_mutations_of_each_file_end_in_a_result_or_a_message() -> None:
    """In a process of its own, because it limits its memory and watches its files; make fuzz tries 10,000 of each."""
    paths = os.pathsep.join([*sys.path, str(TESTS), str(TESTS / "hostile")])
    command = [sys.executable, str(TESTS / "hostile" / "fuzz.py"), "--count", "60"]
    found = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_fuzzer_notices_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box, outside = tmp_path / "box", tmp_path / "outside"
    box.mkdir()
    outside.touch()
    (box / "link").symlink_to(outside)
    (box / "folder").symlink_to(tmp_path)
    monkeypatch.setattr(fuzz, "_allowed", str(box))
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    for path in (box / "inside", box / "link", tmp_path / "box-sibling", box / "folder" / "file"):
        fuzz._audit("open", (str(path), "w", os.O_WRONLY))
    fuzz._audit("os.rename", (str(outside), str(box / "moved"), -1, -1))
    fuzz._audit("os.remove", (str(box / "link"), -1))
    found, fuzz._written = fuzz._written, []
    assert [one.rpartition("/")[2] for one in found] == ["outside", "box-sibling", "file", "outside"]


@pytest.mark.parametrize("key", ["setting", "data__folder", "method__name"])
def test_a_record_or_spec_never_names_code_that_is_imported(
    crmatch: Command, finished: Path, stripes: Path, tmp_path: Path, key: str
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\ndef run():\n    return None\n")
    reference = f"{tmp_path}/evil.py:run" + ("" if key == "method__name" else "@4")
    change(finished / "spec.json", **{key: reference})
    change(finished / "record.json", **{f"spec__{key}": reference})
    out = ["--out", tmp_path / "out"]
    for command in (
        ["runs", finished],
        ["report", finished, *out],
        ["suggest", finished],
        ["train", "stripes@2", "--from", finished],
    ):
        crmatch(*command, "--data-dir", stripes)
    assert crmatch("train", "stripes@2", "--config", finished / "spec.json", *out, "--data-dir", stripes).code == 2
    assert not ran.exists()


@pytest.mark.parametrize(
    "network",
    [
        {"kind": "wide_resnet", "filters": 4096, "scales": 6, "repeat": 64},
        {"kind": "fast", "filters": 4096},
        {"kind": "pretrained", "backbone": "hf:somebody/something"},
        {"kind": "own", "code": "evil.py:run#12345678"},
    ],
    ids=lambda network: network["kind"],
)
def test_a_network_that_does_not_fit_its_weights_is_never_built(
    crmatch: Command, finished: Path, stripes: Path, network: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might take all memory; the name of a pretrained one would start a download."""
    if network["kind"] != "own":
        monkeypatch.setattr(model, "build_network", lambda *arguments, **options: pytest.fail("it was built"))
    change(finished / "config.json", network=network)
    outcome = crmatch("evaluate", finished, "--data-dir", stripes)
    assert outcome.code in (2, 3)
    assert len(outcome.err.splitlines()) == 2


@pytest.mark.parametrize("name", NETWORKS)
def test_shapes_without_memory_are_those_of_the_network(name: str) -> None:
    config = NETWORKS[name]
    if "filters" in type(config).model_fields:
        config = config.model_copy(update={"filters": 3})
    assert isinstance(config, NamedNetwork)
    built = build_network(config, channels=3, image_size=32, classes=5).state_dict()
    shapes = weight_shapes(config, 3)
    assert shapes == {key: weight.shape for key, weight in built.items() if key.startswith("backbone.")}


@pytest.mark.parametrize(
    "refiner", [{"prototypes": 10**12, "heads": 1}, {"prototypes": 3, "heads": 10**9}, {"prototypes": 3, "heads": 0}]
)
def test_a_refiner_that_does_not_fit_is_refused(
    crmatch: Command, finished: Path, stripes: Path, refiner: dict[str, int]
) -> None:
    change(finished / "config.json", refiner=refiner)
    outcome = crmatch("evaluate", finished, "--data-dir", stripes)
    assert outcome.code == 3
    assert "prototypes and" in outcome.err


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_weights_that_predict_no_numbers_are_a_message(crmatch: Command, finished: Path, stripes: Path, value: float) -> None:
    weights = {
        name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
        for name, tensor in safetensors.torch.load_file(finished / "model.safetensors").items()
    }
    safetensors.torch.save_file(weights, finished / "model.safetensors")
    change(finished / "config.json", checksum=checksum((finished / "model.safetensors").read_bytes()))
    outcome = crmatch("evaluate", finished, "--data-dir", stripes)
    assert outcome.code == 3
    assert "predictions are not numbers" in outcome.err


@pytest.mark.parametrize("name", ["record.json", "config.json", "model.safetensors", "metrics.jsonl"])
@pytest.mark.parametrize("place", ["/dev/zero", "pipe", "/"])
def test_a_link_to_something_endless_is_not_read(
    crmatch: Command, finished: Path, stripes: Path, name: str, place: str
) -> None:
    os.mkfifo(finished / "pipe")
    (finished / name).unlink()
    (finished / name).symlink_to(place)
    outcome = crmatch("report", finished, "--data-dir", stripes, "--out", finished / "report.html")
    assert outcome.code in (0, 3)  # without a model the report has no pictures
    with pytest.raises(OSError, match="not a regular file"):
        read_file(finished / name)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("error/ema", "NaN"),
        ("error/ema", '"low"'),
        ("error/ema", "66666.7"),
        ("error/ema", "null"),
        ("loss/total", "[1]"),
        ("step", '"3"'),
        ("step", "1.5"),
        ("mask_rate", "1" + "0" * 400),
    ],
)
def test_curves_are_numbers(finished: Path, line: str, value: str) -> None:
    directory = RunDirectory(finished)
    lines = directory.metrics.read_text().splitlines()
    values = {**json.loads(lines[0]), line: 0}
    lines[0] = json.dumps(values).replace(f'"{line}": 0', f'"{line}": {value}')
    directory.metrics.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"line 1 of .* is damaged"):
        directory.read_metrics()


def test_curves_of_half_a_gigabyte_are_not_read(finished: Path) -> None:
    os.truncate(RunDirectory(finished).metrics, 512 << 20)  # takes no space on the disk
    with pytest.raises(DataError, match="more than 128 MB"):
        RunDirectory(finished).read_metrics()


@pytest.mark.parametrize(
    "changes",
    [
        {"class_names": ["only one"]}, {"calibration_error": None}, {"test_images": 0}, {"test_images": 10**40},
        {"machine": {"versions": 3}}, {"confusion": [[-1, 0], [0, 9]]},
        {"ema": {"last": 1e300, "median_last_20": 1, "best_on_test": 1}},
    ],
)  # fmt: skip
def test_a_record_whose_parts_do_not_fit_together_is_refused(
    crmatch: Command, finished: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    change(finished / "record.json", **changes)
    outcome = crmatch("report", finished, "--out", tmp_path / "report.html")
    assert outcome.code == 3
    assert "is not a run record" in outcome.err


def test_names_cannot_command_the_terminal(crmatch: Command, finished: Path, stripes: Path) -> None:
    name = "a\x1b[2J\x07\u202eb"
    change(finished / "record.json", spec__method={"name": name})
    listed = crmatch("runs", finished)
    assert listed.code == 0, listed.err
    assert r"a\x1b[2J\x07\u202eb" in listed.out
    change(finished / "spec.json", recipe=[name])
    (finished / "record.json").unlink()
    assert "\x1b" not in crmatch("runs", finished).err
    assert "\x1b" not in crmatch("train", name).err


def test_a_number_of_any_length_is_no_training_image(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text(f"path,label\n{'9' * 5000},stripe 1\n")
    outcome = crmatch("train", "stripes@2", "--data-dir", stripes, "--out", tmp_path, "--labels", labels, "--steps", 1)
    assert outcome.code == 3
    assert "is not a training image" in outcome.err


def test_labels_that_go_up_to_trillions_make_no_trillion_classes(tmp_path: Path) -> None:
    file = write_packed(tmp_path / "set.npz", class_names=None)
    arrays = {**np.load(file)}
    arrays["train_labels"][0] = 10**12
    np.savez(file, **arrays)
    with pytest.raises(DataError, match="go up to 1000000000000 for 36 images"):
        read_packed(file)


def test_an_archive_that_expands_a_thousandfold_is_refused_before_it_does(tmp_path: Path) -> None:
    file = write_packed(tmp_path / "set.npz", train_images=np.zeros((70_000, 32, 32, 1), np.uint8))
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(DataError, match=r"train_images\.npy would expand more than 100-fold"):
        read_packed(file)


def test_an_architecture_of_timm_names_no_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "_library", lambda name: pytest.fail("it was asked for"))
    for name, arguments in (("hf-hub:somebody/model", {}), ("resnet18", {"checkpoint_path": "/tmp/evil.pt"})):
        with pytest.raises(DataError, match="names other files"):
            timm.build({"architecture": name, "model_args": arguments, "pretrained_cfg": {}})


def test_writing_never_replaces_a_device_a_pipe_or_a_directory(
    crmatch: Command, finished: Path, stripes: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "folder.html").mkdir()
    for name in ("pipe.html", "folder.html"):
        said = crmatch("report", finished, "--data-dir", stripes, "--out", tmp_path / name)
        assert said.code == 2
        assert name in said.err
        assert not (tmp_path / name).is_file()


def test_a_new_file_has_the_permissions_of_the_old_one(tmp_path: Path) -> None:
    private = tmp_path / "private.csv"
    private.touch(0o600)
    write_file(private, b"new")
    assert private.stat().st_mode & 0o777 == 0o600
    assert private.read_bytes() == b"new"


def test_a_file_that_is_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "elsewhere").read_bytes() == b"old"
    assert (tmp_path / "link").read_bytes() == b"new"


@pytest.mark.parametrize("name", ["checkpoint", "tensorboard"])
def test_a_run_does_not_write_through_links_in_its_directory(tmp_path: Path, name: str) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    run.mkdir()
    (run / name).symlink_to(elsewhere)
    with pytest.raises(DataError, match=f"{name} is a link"), RunDirectory(run).locked():
        pass


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_run_directory_inside_of_the_runs_is_no_link(tmp_path: Path, depth: int) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "runs" / "setting" / "method" / "split1"
    elsewhere.mkdir()
    link = [run, *run.parents][depth]
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises(DataError, match="is a link"), RunDirectory(run).locked():
        pass
    assert not list(elsewhere.iterdir())


def test_only_temporary_files_of_our_own_are_removed(tmp_path: Path) -> None:
    names = [".labels.csv.17.tmp", ".labels.csv.backup.tmp", ".other.csv.17.tmp", "labels.csv.17.tmp"]
    for name in names:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path, "labels.csv")
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([names[1], names[3]])
    remove_leftovers(tmp_path / "absent")


@pytest.mark.parametrize(
    "damage", ["no checksum", "a list", "no network", "no names", "garbage", "another shape", "a tensor less"]
)
def test_a_damaged_model_to_start_from_is_a_message(crmatch: Command, finished: Path, stripes: Path, damage: str) -> None:
    config = finished / "config.json"
    values = json.loads(config.read_text())
    weights = safetensors.torch.load_file(finished / "model.safetensors")
    content = safetensors.torch.save(
        {
            name: tensor[:, :1].contiguous() if damage == "another shape" and tensor.ndim == 4 else tensor
            for name, tensor in weights.items()
            if damage != "a tensor less" or name != sorted(weights)[0]
        }
    )
    content = b"garbage" if damage == "garbage" else content
    (finished / "model.safetensors").write_bytes(content)
    values["checksum"] = checksum(content)
    for name, key in (("no checksum", "checksum"), ("no network", "network"), ("no names", "class_names")):
        if damage == name:
            del values[key]
    config.write_text(json.dumps([values] if damage == "a list" else values))
    keys = [part for part in tiny_command(stripes, finished.parents[3] / "next") if part != "--json"]
    said = crmatch(*keys, "--from", finished)
    assert said.code == 3, said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("damage", ["removed", "cut off"])
def test_training_again_repairs_a_damaged_model(crmatch: Command, finished: Path, stripes: Path, damage: str) -> None:
    weights, spec = finished / "model.safetensors", RunDirectory(finished).read_spec()
    assert spec
    before = {file: file.read_bytes() for file in (weights, finished / "config.json", finished / "record.json")}
    if damage == "removed":
        weights.unlink()
    else:
        weights.write_bytes(before[weights][:-100])
    assert crmatch("evaluate", finished, "--data-dir", stripes).code == 3
    run(spec, Workspace(finished.parents[2], stripes), Execution("cpu"))
    assert {file: file.read_bytes() for file in before} == before


def test_exports_of_other_programs_are_limited(crmatch: Command, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", unlabeled=2)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "bomb.xml").write_text('<!DOCTYPE a [<!ENTITY b "x">]><annotations/>')
    for export in (Path("/dev/zero"), tmp_path / "pipe.json", tmp_path / "deep.json", tmp_path / "bomb.xml"):
        said = crmatch("data", "import", export, photos)
        assert said.code in (2, 3)
        assert str(export) in said.err
        assert "Traceback" not in said.err


@pytest.mark.process
def test_a_full_standard_output_is_a_message(finished: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "crmatch", "runs", str(finished), "--json"]
        said = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert said.returncode == 3
    assert "Traceback" not in said.stderr
    assert "No space left" in said.stderr


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"test_labels": np.array([-1] * 12)}, "negative label"),
        ({"class_names": np.array(["a", "\ud800", "c"])}, "cannot be written"),
        ({"train_images": np.zeros((36, 7, 8, 3), np.uint8)}, "at least 8 pixels"),
        ({"train_images": np.zeros((36, 16, 16, 2), np.uint8)}, "1 or 3 channels"),
        ({"test_images": np.zeros((12, 16, 16, 1), np.uint8)}, "images of one kind"),
        ({"unlabeled_images": np.zeros((3, 9, 9, 3), np.uint8)}, "another size"),
    ],
)
def test_packed_sets_that_cannot_be_trained_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    write_packed(tmp_path / "stripes.npz")
    content = {**np.load(tmp_path / "stripes.npz"), **arrays}
    np.savez(tmp_path / "stripes.npz", **content)
    with pytest.raises(DataError, match=message):
        read_packed(tmp_path / "stripes.npz")


def test_a_labels_file_that_links_to_itself_is_a_message(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").symlink_to(tmp_path / "labels.csv")
    said = crmatch("train", "stripes@2", "--data-dir", stripes, "--labels", tmp_path / "labels.csv")
    assert said.code in (2, 3)
    assert "labels.csv" in said.err


def test_a_labels_file_of_a_gigabyte_is_refused_without_reading_it(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.csv"
    with labels.open("wb") as file:
        file.truncate(1 << 30)
    said = crmatch("train", "stripes@2", "--data-dir", stripes, "--labels", labels)
    assert said.code == 2
    assert "more than 128 MB" in said.err


@pytest.mark.parametrize("content", ['{"network": 5}', '{"network": [1]}', "[", "5", None])
def test_an_odd_config_file_is_a_message(crmatch: Command, stripes: Path, tmp_path: Path, content: str | None) -> None:
    config = tmp_path / "config.json" if content else Path("/dev/zero")
    if content:
        config.write_text(content)
    said = crmatch("train", "stripes@2", "--data-dir", stripes, "--out", tmp_path / "runs", "--config", config)
    assert said.code == 2, said.err


@pytest.mark.process
def test_unreadable_pictures_cannot_command_the_terminal(crmatch: Command, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "\x1b]0;owned\x07.png").write_bytes(b"no picture")
    said = crmatch("predict", finished, tmp_path / "\x1b]0;owned\x07.png", "--out", tmp_path / "predictions.csv")
    assert "unreadable" in said.err
    assert "\x1b" not in said.err
