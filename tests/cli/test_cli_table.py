"""`crmatch table` as typed: dry runs without torch or data, real tiny tables, interruptions, wrong requests."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from conftest import TINY, Command, options
from crmatch.errors import DataError, DivergedError
from crmatch.runs.finished import find_runs
from crmatch.runs.workspace import Workspace
from crmatch.spec.run_spec import RunSpec
from crmatch.training.execution import Execution


def tiny(name: str, data_dir: Path, out: Path, steps: int = 6) -> list[object]:
    keys = {key: value for key, value in TINY.items() if key not in ("plan.steps", "network")} | {"network.filters": 4}
    places = ["--data-dir", data_dir, "--out", out]
    return ["table", name, "--setting", "stripes@2", "--steps", steps, *places, *options(keys | {"method.rotation_images": 4})]


def records_of(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.rglob("record.json")}


@pytest.mark.process
def test_a_dry_run_needs_neither_torch_nor_data(tmp_path: Path) -> None:
    words = ["crmatch", "table", "ablation", "--unprinted", "--dry-run", "--engine", "ray"]
    code = f"import sys; sys.argv = {words}\nfrom crmatch.cli.app import main\n"
    code += "try: main()\nexcept SystemExit as stop: assert not stop.code\nassert not {'torch', 'ray'} & set(sys.modules)"
    environment = {**os.environ, "CRMATCH_DATA": str(tmp_path / "nothing")}
    command = [sys.executable, "-c", code]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    ).stdout.splitlines()
    assert lines[0] == "Table 3: ablation of RotNet and FeatDistLoss; the paper's settings, split 1 (n = 1)"
    assert lines[1] == "24 runs, 0 finished, 24 missing"
    assert "crmatch train cifar10@4 --recipe paper --set method.rotation_weight=0.0" in lines
    times = r"about 47\d days with 1 thread, estimated \d\.\d days on one GPU, 5\.\d GB of memory"
    assert any(re.fullmatch(rf"    # 524,288 steps of 2,304 images, {times}", line) for line in lines)
    assert lines[-1].startswith("all of them: about ")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_as_json_lists_only_what_is_missing(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    arguments = tiny("pairs", stripes, tmp_path / "runs")
    before = json.loads(crmatch(*arguments, "--dry-run", "--format", "json").out)
    assert before["runs"] == len(before["missing"]) == 6
    command = before["missing"][0]["command"].split()
    assert crmatch(*command[1:]).code == 0
    after = json.loads(crmatch(*arguments, "--dry-run", "--format", "json", "--compile").out)
    assert [run["command"] for run in after["missing"]] == [f"{run['command']} --compile" for run in before["missing"][1:]]


def interrupting(monkeypatch: pytest.MonkeyPatch, call: int, step: int) -> list[RunSpec]:
    """Send SIGTERM at a step of the call-th run; returns the list to which every trained spec is added."""
    import crmatch.runs.run as module

    real, trained = module.run, list[RunSpec]()

    def run(spec: RunSpec, *arguments: Any, progress: Any, **options: Any) -> Any:
        trained.append(spec)
        if len(trained) == call:
            advance = progress.advance
            progress.advance = lambda done: (advance(done), done == step and os.kill(os.getpid(), signal.SIGTERM))
        return real(spec, *arguments, progress=progress, **options)

    monkeypatch.setattr(module, "run", run)
    return trained


def test_an_interrupted_table_loses_no_run_and_repeats_none(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs"
    arguments = [*tiny("ablation", stripes, out), "--format", "json"]
    trained = interrupting(monkeypatch, call=3, step=5)
    stopped = crmatch(*arguments)
    assert stopped.code == 75
    assert stopped.out == ""
    assert "2 of 4: RotNet –, FeatDistLoss ✓, stripes@2, split 1: finished" in stopped.err
    before = records_of(out)
    assert len(before) == 2
    first = trained.copy()
    again = crmatch(*arguments)
    assert again.code == 0
    assert trained[len(first) :] == [first[2], trained[-1]]
    assert "after step 5" in again.err
    assert records_of(out).items() >= before.items()
    cells = json.loads(again.out)["cells"]
    assert [len(cell["runs"]) for cell in cells] == [1, 1, 1, 1]
    errors = [json.loads((Path(cell["runs"][0]) / "record.json").read_text())["ema"]["last"] for cell in cells]
    assert [cell["mean"] for cell in cells] == errors
    del trained[:]
    assert crmatch(*arguments).out == again.out
    assert not trained


def test_fresh_sets_the_old_runs_aside(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    arguments = [*tiny("threshold", stripes, out, steps=2), "--format", "csv"]
    first = crmatch(*arguments)
    before = records_of(out)
    assert crmatch(*arguments, "--fresh").out == first.out
    after = records_of(out)
    assert {path.parent.name for path in after} == {"split1-seed0", "split1-seed0.old1"}
    assert len(after) == 2 * len(before) == 10
    assert len(find_runs([out])) == 5
    aside = next(path.parent for path in after if path.parent.name.endswith(".old1"))
    assert find_runs([aside]) == [aside]


def test_a_diverged_run_is_shown_and_the_others_go_on(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import crmatch.runs.run as module

    real, executions = module.run, set()

    def run(spec: RunSpec, workspace: Workspace, execution: Execution, **options: Any) -> Any:
        executions.add(execution)
        if spec.method.model_dump()["supervised_weight"] == 0:
            raise DivergedError("the loss is not finite at step 3.\nmore")
        return real(spec, workspace, Execution(), **options)

    monkeypatch.setattr(module, "run", run)
    arguments = [*tiny("ablation", stripes, tmp_path / "runs", steps=2), "--unprinted", "--format", "markdown"]
    outcome = crmatch(*arguments, "--compile", "--device", "cpu")
    assert outcome.code == 0
    assert executions == {Execution("cpu", compile=True)}
    assert "| ✓ | ✓ without L_S | diverged: the loss is not finite at step 3. [1] |" in outcome.out
    assert "| ✓ | ✓ without L_PL ‡ | " in outcome.out
    assert len(records_of(tmp_path / "runs")) == 5


def test_tables_are_made_from_records_alone_and_saved(crmatch: Command, stripes: Path, tmp_path: Path) -> None:
    out, kept, file = tmp_path / "runs", tmp_path / "kept", tmp_path / "table.md"
    arguments = tiny("pairs", stripes, out, steps=2)
    made = crmatch(*arguments, "--format", "markdown").out
    for number, path in enumerate(records_of(out)):
        kept.mkdir(exist_ok=True)
        (kept / f"{number}.json").write_text(path.read_text())
    outcome = crmatch(*arguments, "--records", kept, "--format", "markdown", "--save", file)
    assert outcome.out == f"Saved in {file}\n"
    assert file.read_text().partition("<details>")[0] == made.partition("<details>")[0]
    assert str(kept) in file.read_text()


def test_pages_are_made_again_from_collected_records(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    results = importlib.import_module("results")
    docs, out = tmp_path / "docs", tmp_path / "runs"
    records = docs / "records"
    records.mkdir(parents=True)
    monkeypatch.setattr(results, "DOCS", docs)
    monkeypatch.setattr(results, "RECORDS", records)
    monkeypatch.setenv("CRMATCH_DATA", str(stripes))
    arguments = tiny("equivariance", stripes, out, steps=2)
    assert crmatch(*arguments).code == 0
    monkeypatch.setattr("sys.argv", ["results.py", "--collect", str(out)])
    probed = {key: {"mean": 12.5, "std": 0.5, "n": 10} for key in ("translation", "scaling", "rotation", "color jitter")}
    for path in records_of(out):
        (path.parent / "probe.json").write_text(json.dumps(probed))
    words = [str(word) for word in arguments if str(word).startswith("--set=")]
    marker = f"<!-- crmatch table equivariance --setting stripes@2 --steps 2 {' '.join(words)} -->"
    page = docs / "page.md"
    page.write_text(f"Before.\n{marker}\nold\n<!-- end of table -->\nAfter.\n")
    with pytest.raises(DataError, match="has no 'strong against weak'"):
        results.main()
    for path in records.rglob("*.probe.json"):
        path.write_text(json.dumps({**probed, "strong against weak": probed["scaling"]}))
    results.main()
    text = page.read_text()
    assert text.startswith(f"Before.\n{marker}\n\n**Table 4 right")
    assert text.endswith("<!-- end of table -->\nAfter.\n")
    assert "| Rotation | 12.50 ± 0.50 (paper 15.05 ± 0.33) |" in text
    (kept, *_) = [path for path in records.rglob("*.json") if ".probe" not in path.name]
    record = kept.read_text()
    kept.write_text(json.dumps({**json.loads(record), "numerics": 0}))
    for path in records_of(out):
        (path.parent / "probe.json").write_text(kept.with_suffix(".probe.json").read_text())
    results.main()
    assert json.loads(kept.read_text()) == json.loads(record), "a record of older numerics is replaced"
    monkeypatch.setenv("CRMATCH_DATA", str(tmp_path))
    results.main()
    assert page.read_text() == text, "without the data set the page stays as it is"


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_worker_processes_save_when_their_parent_is_stopped_or_killed(
    stripes: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "runs"
    command = [sys.executable, "-m", "crmatch", *map(str, tiny("ablation", stripes, out, steps=40))]
    command += ["--jobs", "2", "--format", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not records_of(out) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == (75 if number == signal.SIGTERM else -signal.SIGKILL), said
    while any(in_use(lock) for lock in out.rglob("run.lock")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = records_of(out)
    assert len(before) < 4
    again = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert [len(cell["runs"]) for cell in json.loads(again.stdout)["cells"]] == [1] * 4
    assert records_of(out).items() >= before.items()
    assert f"{len(before)} of 4 runs are finished" in again.stderr


def in_use(lock: Path) -> bool:
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablaton"], "unknown table 'ablaton'.\nDid you mean 'ablation'? Known: "),
        (
            ["pairs", "--records", ".", "--dry-run"],
            "--records trains nothing, so --dry-run and --fresh mean nothing with it.\n",
        ),
        (["pairs", "--save", "x.txt"], "--save x.txt needs a format for files.\nAdd --format markdown"),
        (["pairs", "--engine", "abacus"], "'abacus' is not"),
        (["pairs", "--jobs", "0"], "greater than or equal to 1"),
        (["pairs", "--ray-address", "auto"], "--ray-address is for Ray clusters.\nAdd --engine ray, or leave it out."),
        (["pairs", "--cpus-per-run", "2"], "--cpus-per-run is for Ray clusters.\nAdd --engine ray, or leave it out."),
    ],
)
def test_wrong_requests_get_two_plain_lines_and_code_2(crmatch: Command, arguments: list[str], message: str) -> None:
    outcome = crmatch("table", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.strip().splitlines()) == 2
    assert outcome.out == ""
