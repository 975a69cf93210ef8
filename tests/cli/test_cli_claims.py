"""`crmatch claims` as typed: dry runs without torch, tiny runs with their analyses, a kill, pages from records alone."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import TINY, Command, options

KEYS = {key: value for key, value in TINY.items() if key != "plan.steps"} | {"method.rotation_images": 4}


def tiny(data_dir: Path, out: Path, *topics: str, splits: str = "1-2", steps: int = 4) -> list[object]:
    places = ["--data-dir", data_dir, "--out", out, "--save", out.parent / "claims.md"]
    return ["claims", *topics, "--setting", "stripes@2", "--splits", splits, "--steps", steps, *places, *options(KEYS)]


def written(out: Path, name: str = "record.json") -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.rglob(name)}


@pytest.mark.process
def test_a_dry_run_lists_runs_and_cost_without_torch_and_data(tmp_path: Path) -> None:
    words = ["crmatch", "claims", "--setting", "svhn@25", "--recipe", "quick", "--dry-run", "--engine", "ray"]
    code = f"import sys; sys.argv = {words}\nfrom crmatch.cli.app import main\n"
    code += "try: main()\nexcept SystemExit as stop: assert not stop.code\nassert not {'torch', 'ray'} & set(sys.modules)"
    environment = {**os.environ, "CRMATCH_DATA": str(tmp_path / "nothing")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("claims about svhn@25; recipe quick, ")
    assert re.fullmatch(r"(\d+) runs, 0 finished, \1 missing", lines[1])
    commands = [line for line in lines if line.startswith("crmatch train ")]
    assert commands[0] == "crmatch train svhn@25 --recipe quick"
    assert len(commands) == len(set(commands)) == int(lines[1].split()[0])
    assert sum(command.startswith("crmatch train svhn@4 ") for command in commands) == 10
    assert lines[-2].startswith("all of them: about ")
    assert lines[-1].endswith(" claims; 20 analyses of finished runs are missing (crmatch probe, crmatch distances)")
    assert not list(tmp_path.iterdir())


def test_runs_are_trained_and_analyzed_once_and_the_page_comes_from_records_alone(
    crmatch: Command, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crmatch.analysis import probe as module

    monkeypatch.setattr(module, "probe", functools.partial(module.probe, repeats=1))
    out, page = tmp_path / "runs", tmp_path / "claims.md"
    arguments = tiny(stripes, out, "features", "pseudo-labels")
    made = crmatch(*arguments)
    assert made.code == 0, made.err
    records, analyses = written(out), written(out, "probe.json") | written(out, "distances.json")
    assert (len(records), len(analyses)) == (6, 8)
    assert "6 of 6: without FeatDistLoss, stripes@2, split 2: finished" in made.err
    assert re.search(r"claims about stripes@2; recipe quick, 4 steps, .*, splits 1-2: holds: \d+, does not hold: ", made.out)
    first = page.read_text()
    assert re.search(r"\| translation: CR-Match < CR-Inv \| [+−]\d+\.\d\d \| .* \| 2 \| ", first)
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    lost = next(iter(written(out, "probe.json")))
    values = lost.read_text()
    lost.unlink()
    again = crmatch(*arguments)
    assert (again.code, again.out) == (0, made.out)
    assert f"crmatch probe {lost.parent}" in again.err
    assert written(out) == records
    assert lost.read_text() == values
    assert page.read_text() == first
    html = crmatch(*arguments, "--records", out, "--save", tmp_path / "page.html")
    assert html.out.splitlines()[:-1] == made.out.splitlines()[:-1]
    assert not written(out, "record.probe.json")
    text = (tmp_path / "page.html").read_text()
    assert "<td>translation: CR-Match &lt; CR-Inv</td>" in text
    assert "data:image/png;base64," in text


@pytest.mark.process
def test_a_killed_command_continues_where_it_stopped(stripes: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    command = [sys.executable, "-m", "crmatch", *map(str, tiny(stripes, out, "ablation", splits="1", steps=60))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300

    def unfinished() -> list[Path]:
        """Runs with a checkpoint and without a record."""
        runs = {path.parents[1] for path in out.rglob("checkpoint/step-*.safetensors")}
        return [run for run in runs if not (run / "record.json").exists()]

    while not (written(out) and unfinished()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = written(out)
    assert 1 <= len(before) < 4
    assert not (tmp_path / "claims.md").exists()
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert f"{len(before)} of 4 runs are finished" in again.stderr
    assert "resuming after step" in again.stderr
    assert len(written(out)) == 4
    assert written(out).items() >= before.items()
    assert "split 1: holds: " in again.stdout
    assert (tmp_path / "claims.md").exists()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["mian"], "unknown topic 'mian'.\nDid you mean 'main'? Known: ", 2),
        (["--save", "claims.txt"], "--save claims.txt has no known format.\nUse .md or .html.", 2),
        (["--records", ".", "--dry-run"], "--records trains nothing, so --dry-run means nothing with it.\n", 2),
        (["--cpus-per-run", "2"], "--cpus-per-run is for Ray clusters.\nAdd --engine ray", 2),
        (["--splits", "0"], "is not a list of splits", 2),
        (["--records", "."], "there are no finished runs for these claims in .", 3),
    ],
)
def test_wrong_requests_get_two_plain_lines(
    crmatch: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = crmatch("claims", *arguments)
    assert outcome.code == code
    assert message in outcome.err
    assert len(outcome.err.strip().splitlines()) == 2
    assert not list(tmp_path.iterdir())
