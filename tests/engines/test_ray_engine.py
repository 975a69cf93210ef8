"""`crmatch table --engine ray` on a real cluster of two nodes on this machine: kills, stops, and the same table in the end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_cluster import Cluster, wait_for

from conftest import TINY, Command, options

pytestmark = pytest.mark.process
with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'crmatch[ray]'"
)


def start(cluster: Cluster, arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """`crmatch table ARGUMENTS --engine ray` in `folder`."""
    command = [sys.executable, "-m", "crmatch", "table", *arguments, "--format", "json"]
    return cluster.drive([*command, "--engine", "ray", "--ray-address", cluster.address], folder)


def finished(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("record.json")}


def in_the_middle(processes: list[int], since: float = 0) -> list[int]:
    """Those of the processes whose run saved a checkpoint since a time: they have its lock open."""
    found = []
    for number in processes:
        with contextlib.suppress(OSError):  # it ended
            files = [Path(os.readlink(path)) for path in Path(f"/proc/{number}/fd").iterdir()]
            runs = [path.parent for path in files if path.name == "run.lock"]
            saved = [path for run in runs for path in run.glob("checkpoint/*.safetensors")]
            found += [number] if any(path.stat().st_mtime > since for path in saved) else []
    return found


@with_ray
def test_a_killed_worker_and_a_stopped_driver_lose_nothing(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {key: value for key, value in TINY.items() if key != "plan.steps"}
    arguments = ["ablation", "--setting", "stripes@2", "--steps", "40", "--data-dir", os.path.relpath(stripes, tmp_path / "x")]
    arguments += options({**keys, "method.rotation_images": 4})
    with Cluster() as cluster:
        driver = start(cluster, arguments, tmp_path / "ray")
        wait_for(lambda: in_the_middle(cluster.training()), driver)
        os.kill(in_the_middle(cluster.training())[0], signal.SIGKILL)
        wait_for(lambda: finished(tmp_path / "ray"), driver)
        driver.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        wait_for(lambda: not cluster.training())
        assert time.monotonic() - asked < 10
        out, said = driver.communicate(timeout=60)
        assert (driver.returncode, out) == (75, ""), said
        assert "everything is saved.\nResume with the same command." in said
        before = finished(tmp_path / "ray")
        out, said = start(cluster, arguments, tmp_path / "ray").communicate(timeout=120)
        assert finished(tmp_path / "ray").items() >= before.items()
        assert f"{len(before)} of 4 runs are finished" in said
    (tmp_path / "local").mkdir()
    monkeypatch.chdir(tmp_path / "local")
    assert crmatch("table", *arguments, "--format", "json").out == out


@with_ray
@pytest.mark.slow
def test_the_table_is_the_local_one_after_a_killed_driver_worker_and_node(tmp_path: Path) -> None:
    arguments = ["ablation", "--setting", "digits@4", "--recipe", "quick", "--steps", "100"]
    folder = tmp_path / "ray"
    with Cluster() as cluster:
        driver = start(cluster, arguments, folder)
        wait_for(lambda: in_the_middle(cluster.training()), driver)
        driver.kill()
        driver.communicate(timeout=60)
        before = finished(folder)
        began = time.time()
        driver = start(cluster, arguments, folder)
        wait_for(lambda: in_the_middle(cluster.training(1), began), driver)
        cluster.kill(1)
        cluster.start(1)
        began = time.time()
        wait_for(lambda: in_the_middle(cluster.training(), began), driver)
        os.kill(in_the_middle(cluster.training())[0], signal.SIGKILL)
        out, said = driver.communicate(timeout=600)
        assert driver.returncode == 0, said
        assert "4 of 4: " in said
        assert finished(folder).items() >= before.items()
        assert start(cluster, arguments, folder).communicate(timeout=120)[0] == out
    (tmp_path / "local").mkdir()
    local = [sys.executable, "-m", "crmatch", "table", *arguments, "--format", "json", "--engine", "local"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(local, cwd=tmp_path / "local", env=environment, capture_output=True, text=True, check=True)
    assert answer.stdout == out
    assert [len(cell["runs"]) for cell in json.loads(out)["cells"]] == [1] * 4


@with_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "nowhere"])
def test_a_wrong_address_is_refused_before_anything_is_set_aside(crmatch: Command, tmp_path: Path, address: str) -> None:
    options = ["--engine", "ray", "--ray-address", address, "--fresh"]
    outcome = crmatch("table", "ablation", "--setting", "digits@4", "--out", tmp_path, *options)
    assert outcome.code == 2
    assert outcome.err.startswith(f"crmatch: no Ray cluster answers at {address}: ")
    assert "--ray-address HOST:PORT" in outcome.err
    assert len(outcome.err.splitlines()) == 2


def test_without_ray_it_says_what_to_install(crmatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    outcome = crmatch("table", "ablation", "--setting", "digits@4", "--out", tmp_path, "--engine", "ray")
    assert outcome.code == 2
    assert outcome.err == "crmatch: --engine ray needs Ray, which is not installed.\npip install 'crmatch[ray]'\n"
    assert not list(tmp_path.iterdir())
