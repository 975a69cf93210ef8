"""Worker processes: order, crashes, a full disk, stopping, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from picture_corpus import broken_pictures, encoded, picture, pixels, write_corpus, written

from crmatch.data.folder.decode import Facts
from crmatch.data.folder.workers import decode_pictures, decode_rows
from crmatch.errors import DataError

pytestmark = pytest.mark.process


def pictures(folder: Path, count: int) -> list[Path]:
    return [written(folder / f"{seed}.png", encoded(picture(seed), "PNG")) for seed in range(count)]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_pictures_keep_their_order(tmp_path: Path) -> None:
    found, facts = decode_pictures(pictures(tmp_path, 150), 24, 3)
    assert all((found[seed] == pixels(seed)).all() for seed in range(150))
    assert len({fact.digest for fact in facts if isinstance(fact, Facts)}) == 150
    assert decode_pictures([], 24, 3)[0].shape == (0, 24, 24, 3)


def test_broken_and_missing_pictures_are_zeros_with_a_reason_and_nothing_leaks(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, content) for name, content in broken_pictures().items()]
    before = open_files()
    found, reasons = decode_pictures([*paths, tmp_path / "gone.png"], 24, 3)
    assert all(isinstance(reason, str) for reason in reasons)
    assert reasons[-1] == "no such file or directory"
    assert not found.any()
    assert open_files() == before


def test_stopping_halfway_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    jobs = [(seed, str(path)) for seed, path in enumerate(pictures(tmp_path, 50))]
    target = written(tmp_path / "pixels", bytes(50 * 24 * 24 * 3))
    before = open_files()
    decoding = decode_rows(jobs, target, 24, 3, workers=2)
    assert next(decoding)
    decoding.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert open_files() == before


def fake_python(path: Path, code: str) -> str:
    """An interpreter whose decoder is changed by `code`."""
    path.with_suffix(".py").write_text(
        f"import os, sys\nfrom crmatch.data.folder import workers\nreal = workers.decode\n{code}\nworkers.work()\n"
    )
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {path.with_suffix(".py")} "$3" "$4" "$5" "$6"\n')
    path.chmod(0o755)
    return str(path)


def test_a_picture_that_crashes_the_decoder_is_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "workers.decode = lambda path, *rest: os._exit(9) if path.endswith('/13.png') else real(path, *rest)"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", code))
    monkeypatch.setattr("crmatch.data.folder.workers._CHUNKS_PER_WORKER", 1)
    found, facts = decode_pictures(pictures(tmp_path, 20), 24, 3)
    assert [row for row, fact in enumerate(facts) if isinstance(fact, str)] == [13]
    assert facts[13] == "crashes the decoder"
    assert all((found[seed] == pixels(seed)).all() for seed in range(20) if seed != 13)


def test_a_full_disk_is_an_error_not_a_broken_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def full(*rest): raise OSError(28, 'No space left on device')\nos.pwrite = full"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", code))
    with pytest.raises(DataError, match="No space left on device") as caught:
        decode_pictures(pictures(tmp_path, 1), 24, 3)
    assert str(caught.value).count("\n") == 1


def test_a_decoder_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DataError, match="does not start"):
        decode_pictures([tmp_path / "a.png"], 24, 3)


MEASURE = """
import resource, sys
from pathlib import Path
from crmatch.data.folder.cache import decode_folder
from crmatch.data.folder.scan import scan_folder
decoded = decode_folder(scan_folder(Path(sys.argv[1])), 24, Path(sys.argv[2]))
assert 'torch' not in sys.modules
print(len(decoded.broken), sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


def test_bombs_and_broken_pictures_need_no_more_memory_than_clean_ones(tmp_path: Path) -> None:
    peak = {}
    for name, bad in (("clean", False), ("broken", True)):
        write_corpus(tmp_path / name, broken=bad)
        arguments = [sys.executable, "-c", MEASURE, str(tmp_path / name), str(tmp_path / f"data of {name}")]
        output = subprocess.run(arguments, check=True, capture_output=True, text=True)
        assert not output.stderr
        count, peak[name] = map(int, output.stdout.split())
        assert count == (50 if bad else 0)
    assert peak["broken"] < 1.5 * peak["clean"]
