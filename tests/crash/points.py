"""A command that crashes or fails at any of its file operations, and is run again.

`make crash-points` does this at every operation; figures go to docs/results/survival.md.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from disk import ERRORS, FATES, Disk, Fate, restore
from PIL import Image
from survival_page import write_table

from conftest import SMALLEST, Outcome, exit_code, options
from crmatch.data.folder.load import load_folder
from crmatch.runs.directory import RunDirectory
from crmatch.training.checkpoint import load_checkpoint
from finished import result_of, stripes_in, write_photos

STEPS, INTERVAL = 6, 2
KEYS = {**SMALLEST, "plan.steps": STEPS, "plan.evaluate_every": 3, "plan.log_every": 1, "plan.checkpoint_every": INTERVAL}
"""A run of a twentieth of a second."""


def call(arguments: Iterable[object]) -> Outcome:
    """Run a command in this process; unlike the fixture `crmatch`, also outside of pytest."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = exit_code(list(arguments))
    return Outcome(code, out.getvalue(), err.getvalue())


class Point(NamedTuple):
    """An operation at which something happened, and what was wrong afterwards."""

    operation: str
    what: str
    problem: str


class Subject:
    """A command with a folder that it writes, and the result that it must have in the end."""

    def __init__(
        self,
        root: Path,
        arguments: list[object],
        result: Callable[[Outcome], Any],
        start: dict[str, bytes | None] | None = None,
    ) -> None:
        """`start` is what the folder contains before the command."""
        self.root, self.arguments, self.result, self.start = root, arguments, result, start or {}

    @cached_property
    def recorded(self) -> tuple[Disk, Any]:
        """Operations and snapshots of the undisturbed command, and its result."""
        restore(self.root, self.start)
        with Disk(self.root, records=True).active() as disk:
            outcome = call(self.arguments)
        assert outcome.code == 0, outcome.err
        return disk, self.result(outcome)

    def crash(self, number: int, fate: Fate) -> Point | None:
        """Crash before operation `number` (or after all), run the command again, and compare."""
        disk, _ = self.recorded
        restore(self.root, disk.snapshots[number].after(fate, seed=number))
        return self._continued(number, f"crash, {fate}")

    def fail(self, number: int, code: int, once: bool) -> Point | None:
        """Let operation `number` fail, and all after it unless `once`; run the command again without that, and compare."""
        restore(self.root, self.start)
        with Disk(self.root, fails=lambda place: code if place == number or (place > number and not once) else None).active():
            outcome = call(self.arguments)
        what = f"{errno.errorcode[code]}{' once' if once else ''}"
        lines = [line for line in outcome.err.splitlines() if line]
        if outcome.code not in (0, 3) or (outcome.code == 3 and (len(lines) != 2 or not lines[0].startswith("crmatch: "))):
            return self._point(number, what, f"exit code {outcome.code}: {outcome.err}")
        return self._continued(number, what)

    def _continued(self, number: int, what: str) -> Point | None:
        disk, expected = self.recorded
        # A checkpoint is saved when it was renamed and the next operation, the fsync of its directory, is done.
        saved = sum(kind == "rename" and "/checkpoint/" in path for kind, path in disk.operations[: max(0, number - 1)])
        kept = [load_checkpoint(path) for path in self.root.rglob("checkpoint")]
        newest = max((checkpoint.step for checkpoint in kept if checkpoint), default=0)
        if newest < saved * INTERVAL:
            return self._point(number, what, f"{saved} checkpoints were saved, and the newest is of step {newest}")
        outcome = call(self.arguments)
        if outcome.code:
            return self._point(number, what, f"exit code {outcome.code} of the next command: {outcome.err}")
        try:
            found = self.result(outcome)
        except (AssertionError, OSError, ValueError) as error:  # files are missing, or too many
            return self._point(number, what, f"{type(error).__name__}: {error}")
        return None if found == expected else self._point(number, what, "another result")

    def _point(self, number: int, what: str, problem: str) -> Point:
        disk, _ = self.recorded
        operations = [*(f"{kind} {path}" for kind, path in disk.operations), "the end"]
        return Point(f"{number}: {operations[number]}", what, problem)

    def cases(self, numbers: Iterable[int]) -> Iterator[Point | None]:
        """Every crash and every failure at these operations; None if all went well."""
        for number in numbers:
            for fate in FATES:
                yield self.crash(number, fate)
            if number < len(self.recorded[0].operations):  # after the last one nothing can fail
                for code in ERRORS:
                    yield self.fail(number, code, once=True)
                    yield self.fail(number, code, once=False)


def subjects(folder: Path) -> dict[str, Subject]:
    """Commands that write every kind of file."""
    data_dir, root = stripes_in(folder / "data", per_class=6, side=8, channels=1), folder / "root"
    photos = write_photos(folder / "photos", labeled=4, unlabeled=5, test=2)
    places = ["--data-dir", data_dir, "--out", root]
    train = ["train", "stripes@2", "--recipe=quick", *places, "--json", *options({**KEYS, "method.rotation_images": 2})]

    def run_result(outcome: Outcome) -> Any:
        directory = RunDirectory(Path(json.loads(outcome.out)["run"]))
        files = (directory.spec, directory.split, directory.card, directory.model_config)
        return result_of(directory), [file.read_bytes() for file in files]

    def packed_result(outcome: Outcome) -> Any:
        # If the description was lost, it is written again, with "found in place" as the origin.
        described = json.loads((root / "digits.json").read_text())
        return (root / "digits.npz").read_bytes(), {**described, "date": None, "origin": None}

    def cache_result(outcome: Outcome) -> Any:
        data = load_folder(photos, 8, root)
        return outcome.out, data.train.images.numpy().tobytes(), data.decoded.facts.tobytes()

    def page_result(outcome: Outcome) -> Any:
        return (root / "report.html").read_bytes()

    trained = Subject(root, train, run_result)
    disk, _ = trained.recorded
    half = disk.snapshots[len(disk.snapshots) // 2].after("mixed", seed=1)
    kept = folder / "finished"
    shutil.copytree(root, kept)
    cache = Subject(root, ["data", "check", photos, "--image-size", 8, "--data-dir", root, "--json"], cache_result)
    assert cache.recorded
    filled = {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))}
    Image.fromarray(np.full((24, 30, 3), 200, np.uint8)).save(photos / "unlabeled" / "new.png")
    del cache.recorded  # now there is one picture more
    return {
        "train": trained,
        "train, after a crash in the middle": Subject(root, train, run_result, half),
        "data fetch": Subject(root, ["data", "fetch", "digits", "--data-dir", root], packed_result),
        "data check, first time": cache,
        "data check, after a change": Subject(root, cache.arguments, cache_result, filled),
        "report": Subject(root, ["report", kept, "--data-dir", data_dir, "--out", root / "report.html"], page_result),
    }


def main() -> None:
    """Try every operation of every command; at least one problem is an exit code of 1, and then no page is written."""
    os.fsync = lambda descriptor: None  # nothing here has to survive
    began = time.monotonic()
    rows: list[tuple[object, ...]] = [("command", "operations", "crashes", "failures", "problems")]
    problems = list[Point]()
    with tempfile.TemporaryDirectory() as folder:
        for name, subject in subjects(Path(folder)).items():
            operations = len(subject.recorded[0].operations)
            found = [point for point in subject.cases(range(operations + 1)) if point]
            problems += found
            rows.append((f"`{name}`", operations, len(FATES) * (operations + 1), 2 * len(ERRORS) * operations, len(found)))
            print(*rows[-1], *found, sep="\n")
    if problems:
        sys.exit(1)
    write_table("Every crash point", "make crash-points", began, rows)


if __name__ == "__main__":
    main()
