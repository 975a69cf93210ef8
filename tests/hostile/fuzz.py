"""`make fuzz`: mutated files of strangers; each ends in a result, or in a message and an exit code.

A case fails if there is a traceback, another exit code, a control character in what is printed, more than 1 GiB of memory, more
than 5 seconds of processor time (a minute in all, if it waits), or a file outside of the folder that the command may write.
Memory and time include child processes; their files are not watched.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mutations
import numpy as np
from PIL import Image

from conftest import SMALLEST, exit_code, options
from crmatch.atomic_files import checksum
from finished import stripes_in, train_tiny, write_photos

SECONDS, WAITING, BYTES = 5.0, 60.0, 1 << 30
EXPECTED = {0, 2, 3, 4, 5}
SMALL = {**SMALLEST, "plan.steps": 2, "plan.evaluate_every": 1, "plan.log_every": 1, "plan.checkpoint_every": 1}
SMALL |= {"method.rotation_images": 2}
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate")
"""Events of Python that may change files."""


class TooSlowError(BaseException):
    """Not caught by anything in the package."""


class Target(NamedTuple):
    """A file, how it is changed, and the commands that read it, one after the other; or a folder."""

    file: Path
    mutate: Callable[[bytes, random.Random], bytes] | None
    commands: list[list[object]]


class Sandbox:
    """A folder with a run, a model, a data set and pictures; nothing else may be written."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "sandbox"
        self.data_dir = stripes_in(self.root / "data", per_class=6, side=8, channels=1)
        run = train_tiny(self.root / "runs", self.data_dir, **SMALL)
        unfinished = self.root / "unfinished" / run.relative_to(self.root / "runs")
        shutil.copytree(run, unfinished)
        (unfinished / "record.json").unlink()
        stopped = self.root / "stopped" / run.relative_to(self.root / "runs")
        shutil.copytree(unfinished, stopped)
        first, last = sorted((stopped / "checkpoint").glob("step-*"))
        last.unlink()
        photos = write_photos(self.root / "photos", labeled=4, unlabeled=4, test=2)
        for number in range(4):
            Image.fromarray(np.full((9, 9, 3), 60 * number, np.uint8)).save(photos / "unlabeled" / f"{number}.png")
        lines = ["path,label", *(f"unlabeled/{number}.png,across" for number in range(4)), "unlabeled/04.jpg,down"]
        (photos / "labels.csv").write_text("\n".join(lines) + "\n")
        numbers = self.root / "labels.csv"
        numbers.write_text("path,label\n" + "".join(f"{number},stripe {number % 3}\n" for number in range(9)))
        data, keys = ["--data-dir", self.data_dir], options(SMALL)
        train = ["train", "stripes@2", "--recipe=quick", *data, "--json", *keys]
        evaluate = ["evaluate", run, *data, "--json"]
        report = ["report", run, *data, "--out", self.root / "report.html"]
        predict = ["predict", run, photos / "unlabeled" / "0.png", "--out", self.root / "predictions.csv"]
        listed = ["runs", self.root, *data]
        resumed = [*train, "--out", self.root / "unfinished"]
        check = ["data", "check", photos, "--image-size", 8, *data]
        assert call(check).code == 0  # fills the cache of decoded pictures
        with_labels = [*train, "--labels", numbers, "--out", self.root / "labels"]
        fresh = [*train, "--out", self.root / "fresh"]
        continued = [*train, "--from", run, "--out", self.root / "continued"]
        used = [evaluate] * 18 + [predict, continued]
        mutate_json = mutations.mutate_json
        label_studio, cvat = self.root / "export.json", self.root / "export.xml"
        choices = [{"value": {"choices": ["across"]}}]
        tasks = [{"data": {"image": f"/upload/{number}.png"}, "annotations": [{"result": choices}]} for number in range(4)]
        label_studio.write_text(json.dumps(tasks))
        images = [f'<image name="{number}.png"><tag label="across"></tag></image>' for number in range(4)]
        cvat.write_text("\n".join(["<annotations>", *images, "</annotations>"]))

        def imported(export: Path) -> list[object]:
            return ["data", "import", export, photos, "--out", self.root / "imported.csv"]

        self.targets = {
            "config.json": Target(run / "config.json", mutate_json, used),
            "model.safetensors": Target(run / "model.safetensors", mutations.mutate_safetensors, used),
            "spec.json": Target(unfinished / "spec.json", mutate_json, [listed, resumed]),
            "record.json": Target(run / "record.json", mutate_json, [listed, evaluate, report]),
            "metrics.jsonl": Target(run / "metrics.jsonl", mutations.mutate_lines, [report]),
            "split.json": Target(unfinished / "split.json", mutate_json, [resumed]),
            "checkpoint": Target(first, mutations.mutate_checkpoint, [[*train, "--out", self.root / "stopped"]]),
            "export of Label Studio": Target(label_studio, mutate_json, [imported(label_studio)]),
            "export of CVAT": Target(cvat, mutations.mutate_xml, [imported(cvat)]),
            "metrics.jsonl, resumed": Target(unfinished / "metrics.jsonl", mutations.mutate_lines, [resumed]),
            "labels.csv of a folder": Target(photos / "labels.csv", mutations.mutate_csv, [check]),
            "labels.csv of a data set": Target(numbers, mutations.mutate_csv, [with_labels]),
            "folder of pictures": Target(photos, None, [check, [*predict[:2], photos, *predict[3:]]]),
            ".npz": Target(self.data_dir / "stripes.npz", mutations.mutate_npz, [["data", "check", "stripes", *data], fresh]),
        }
        os.mkfifo(self.root / "pipe")
        self.pristine = {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}

    def clean(self) -> None:
        """Bring the folder back to its beginning."""
        for path in sorted(self.root.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif path not in self.pristine and path != self.root / "pipe":
                path.unlink()
        for path, content in self.pristine.items():
            if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def spoil(self, target: Target, source: random.Random) -> None:
        """Change the file, and what names its checksum: a model's configuration, a checkpoint's name; or put a link there."""
        if target.mutate is None:
            mutations.mutate_folder(target.file, source)
            return
        content = target.mutate(self.pristine[target.file], source)
        if source.randrange(100) == 0:
            target.file.unlink()
            places = ("/dev/zero", "/etc/passwd", "/nowhere", "/", target.file, self.root / "pipe")
            target.file.symlink_to(source.choice(places))
            return
        if target.file.parent.name == "checkpoint":
            target.file.unlink()
            target.file.with_name(f"step-00000001-{checksum(content)}.safetensors").write_bytes(content)
            return
        target.file.write_bytes(content)
        config = target.file.with_name("config.json")
        if target.file.name == "model.safetensors":
            values = json.loads(self.pristine[config])
            config.write_text(json.dumps({**values, "checksum": checksum(content)}))

    def attack(self, name: str, turn: int) -> tuple[int, str | None]:
        """One case: its exit code, and what was wrong, or None."""
        target, source = self.targets[name], random.Random(f"{name} {turn}")
        self.spoil(target, source)
        with watched(self.root) as seen:
            outcome = call(target.commands[turn % len(target.commands)])
        self.clean()
        problems = list(seen)
        if outcome.code not in EXPECTED or "Traceback" in outcome.err or "not fit into memory" in outcome.err:
            problems.append(f"exit code {outcome.code}: {outcome.err[-1500:]}")
        elif sum(line.startswith("crmatch: ") for line in outcome.err.splitlines()) != (outcome.code != 0):
            problems.append(f"exit code {outcome.code}, but the message is {outcome.err!r:.300}")
        if not (outcome.out + outcome.err).replace("\n", "").replace("\t", "").isprintable():
            strange = [letter for letter in outcome.out + outcome.err if not letter.isprintable() and letter not in "\n\t"]
            problems.append(f"prints {strange[:3]}")
        return outcome.code, f"{name}, turn {turn}: {'; '.join(problems)}" if problems else None


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def call(arguments: list[object]) -> Outcome:
    """Run a command in this process; a traceback is part of its stderr, as in a process of its own."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = exit_code(arguments)
        except (Exception, TooSlowError):  # noqa: BLE001 - everything that escapes is a finding
            traceback.print_exc()
            code = 1
    return Outcome(code, out.getvalue(), err.getvalue())


_allowed: str | None = None
_written: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Notes files that are opened for writing, created, renamed or removed outside of the allowed folder."""
    if _allowed is None or event not in CHANGES or isinstance(arguments[0], int):
        return
    if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    temporary = tempfile.gettempdir()
    for argument in {"os.rename": arguments[:2], "os.link": arguments[1:2]}.get(event, arguments[:1]):
        given = os.path.abspath(os.fsdecode(argument))
        # What is opened may be a link; what is renamed or removed is the link itself.
        folder, name = os.path.split(given)
        path = os.path.realpath(given) if event == "open" else os.path.join(os.path.realpath(folder), name)
        allowed = (f"{_allowed}/", f"{temporary}/crmatch-", "/proc/self/", f"/proc/{os.getpid()}/")
        if path not in (_allowed, temporary, "/dev/null") and not path.startswith(allowed):
            _written.append(f"{event} {path}")


@contextlib.contextmanager
def watched(root: Path) -> Iterator[list[str]]:
    """What a command did that it must not: files elsewhere, memory, time."""
    global _allowed
    problems: list[str] = []

    def end(number: int, frame: Any) -> None:
        raise TooSlowError

    signal.signal(signal.SIGPROF, end)
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_PROF, 4 * SECONDS)  # of processor time: others may use this machine
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    ctypes.CDLL(None).malloc_trim(0)  # a command of its own would not have the freed memory of earlier cases
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    began, _allowed = _processor_time(), os.path.realpath(root)
    try:
        yield problems
    finally:
        _allowed = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if (seconds := _processor_time() - began) > SECONDS:
            problems.append(f"{seconds:.1f} seconds")
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        if (peak := max(children, int(status["VmHWM"].split()[0])) << 10) > BYTES:
            problems.append(f"{peak / 2**30:.1f} GiB")
        problems += [f"wrote elsewhere: {one}" for one in dict.fromkeys(_written)]
        _written.clear()


def _processor_time() -> float:
    """Seconds of this process and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    """Try all targets; problems are printed and make the exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="mutations of each file")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--only", default="", help="only files with this in their name")
    parser.add_argument("--page", action="store_true", help="write the rows of the table in docs/results/survival.md")
    chosen = parser.parse_args()
    os.fsync = lambda descriptor: None
    failed = False
    rows: list[tuple[object, ...]] = [("file", "mutations", "still read", "refused with a message", "problems")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CRMATCH_DATA"] = f"{folder}/sandbox/data"
        sandbox = Sandbox(Path(folder))
        os.chdir(sandbox.root)
        limit = 8 << 30  # protects the machine; a case that reaches it fails
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        sys.addaudithook(_audit)
        for name in [name for name in sandbox.targets if chosen.only in name]:
            # Decoding pictures starts processes, so there are fewer folders.
            count = chosen.count if sandbox.targets[name].mutate else max(1, chosen.count // 10)
            cases = [sandbox.attack(name, turn) for turn in range(chosen.first, chosen.first + count)]
            found, read = [said for _, said in cases if said], sum(code == 0 for code, _ in cases)
            failed |= bool(found)
            rows.append((name, len(cases), read, len(cases) - read - len(found), len(found)))
            print(*rows[-1], f"{time.process_time():.0f} s", *found[:30], sep="\n", flush=True)
        os.chdir("/")
    if chosen.page:
        from survival_page import read_table, write_table

        known = {
            row[0]: row for row in [*read_table("Files from strangers"), *rows[1:]]
        }  # of files that were not tried now, too
        write_table(
            "Files from strangers", "make fuzz", None, [rows[0], *(known[name] for name in sandbox.targets if name in known)]
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
