#!/usr/bin/env python3
"""Your own pictures: time and memory to index, decode and reopen a folder of small PNG files.

    python benchmarks/data.py [--pictures 60000] [--rounds 5] [--gibibytes 4] [--out docs/results]

The comparison is a bare loop: two processes open each file with Pillow, convert it to RGB and make an array of it. Their
start-up time is excluded, ours is included. Both take turns within one run, because timings on shared machines vary by a
factor of two from minute to minute. A second part measures the memory for a set of several GiB of pixels. Prints the tables
and writes data.md and data.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
SIDE, LARGE_SIDE = 32, 256
BARE, RATIO, RESTART, MEMORY = 2, 0.6, 2.0, 1.3


def write_pictures(folder: Path, count: int) -> None:
    """Noisy color gradients: labeled/ and test/ of ten classes, the rest unlabeled."""
    random = np.random.default_rng(0)
    gradient = np.linspace(0, 160, SIDE)
    for number in range(count):
        part = f"labeled/{number % 10}" if number < 40 else f"test/{number % 10}" if number % 6 == 0 else "unlabeled"
        ramp = np.add.outer(gradient, gradient[:: 1 if number % 2 else -1])[..., None] * random.random(3)
        pixels = np.clip(ramp + random.normal(20, 12, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
        path = folder / part / f"{number:06}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def start(part: str, *arguments: object) -> subprocess.Popen[str]:
    """A new process that has imported its modules and waits for a line."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--part", part, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    answer(process)
    return process


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def bare_part(folder: str, share: str) -> None:
    """One of the two bare loops; it reads every second file."""
    say("ready")
    sys.stdin.readline()
    paths = sorted(path for path in Path(folder).rglob("*.png"))
    names = [str(path) for path in paths][int(share) :: BARE]
    begin, processor = time.perf_counter(), time.process_time()
    for name in names:
        with Image.open(name) as picture:
            np.asarray(picture.convert("RGB"))
    say([time.perf_counter() - begin, time.process_time() - processor])


def load_part(folder: str, cache: str, size: str) -> None:
    """Scan and load, then read every fourth row of pixels, so that all pages are loaded."""
    from crmatch.data.folder.cache import decode_folder
    from crmatch.data.folder.preflight import preflight
    from crmatch.data.folder.scan import scan_folder

    import torch  # isort: skip

    torch.set_num_threads(1)
    say("ready")
    sys.stdin.readline()
    times, processor = [time.perf_counter()], sum(os.times()[:4])
    index = scan_folder(Path(folder))
    times.append(time.perf_counter())
    decoded = decode_folder(index, int(size) or None, Path(cache))
    times.append(time.perf_counter())
    processor = sum(os.times()[:4]) - processor
    preflight(index, decoded)
    times.append(time.perf_counter())
    say(
        {
            "scan": times[1] - times[0],
            "load": times[2] - times[1],
            "preflight": times[3] - times[2],
            "bytes": decoded.pixels.nbytes,
            "broken": len(decoded.broken),
            "processor": processor,
        }
    )
    sys.stdin.readline()
    say(int(decoded.pixels[:, ::4].sum()))
    sys.stdin.readline()


def memory(process: int) -> dict[str, int]:
    """Memory of a process and its children in bytes: their proportional share of all pages, and of anonymous pages."""
    total = {"Pss": 0, "Pss_Anon": 0}
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        for identifier in [str(process), *children]:
            for line in Path(f"/proc/{identifier}/smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in total:
                    total[name] += int(value.split()[0]) * 1024
    except OSError:
        pass  # a worker has ended in the meantime
    return total


class Watch:
    """Peak memory of a process and its children, above their memory at the start."""

    def __init__(self, process: int) -> None:
        self.process, self.first, self.peak = process, memory(process), memory(process)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            self.peak = {name: max(value, self.peak[name]) for name, value in memory(self.process).items()}

    def stop(self) -> dict[str, int]:
        """Peaks in bytes."""
        self._end.set()
        self._thread.join()
        return {name: self.peak[name] - self.first[name] for name in self.first}


def bare(folder: Path) -> tuple[float, float]:
    """Seconds of the slower of the two bare loops, and processor seconds of both."""
    processes = [start("bare", folder, share) for share in range(BARE)]
    for process in processes:
        go(process)
    seconds, processor = zip(*(answer(process) for process in processes), strict=True)
    for process in processes:
        process.communicate()
    return max(seconds), sum(processor)


def load(folder: Path, cache: Path, watched: bool = False, size: int = 0) -> dict[str, Any]:
    """Times of one start; with `watched` its peak memory too, which makes it slower."""
    process = start("load", folder, cache, size)
    watch = Watch(process.pid) if watched else None
    go(process)
    result: dict[str, Any] = answer(process)
    go(process)
    answer(process)
    time.sleep(0.2)
    if watch:
        result |= watch.stop()
    process.communicate("\n")
    return result


def measure(folder: Path, work: Path, count: int, rounds: int) -> dict[str, Any]:
    """All measurements of the small pictures."""
    lines = []
    for number in range(rounds):
        cache = work / f"cache{number}"
        seconds, processor = bare(folder)
        first, again = load(folder, cache), load(folder, cache)
        shutil.rmtree(cache)
        first |= {name: value for name, value in load(folder, cache, watched=True).items() if name.startswith("Pss")}
        again |= {name: value for name, value in load(folder, cache, watched=True).items() if name.startswith("Pss")}
        shutil.rmtree(cache)
        lines.append(
            {
                "bare_per_second": count / seconds,
                "first_per_second": count / (first["scan"] + first["load"]),
                "ratio": seconds / (first["scan"] + first["load"]),
                "bare_processor_us": processor / count * 1e6,
                "first_processor_us": first["processor"] / count * 1e6,
                "scan_seconds": first["scan"],
                "restart_seconds": again["scan"] + again["load"],
                "preflight_seconds": again["preflight"],
                "first_memory": first["Pss"] / first["bytes"],
                "restart_memory": again["Pss"] / again["bytes"],
                "first_anonymous_mb": first["Pss_Anon"] / 1e6,
                "pixels_mb": first["bytes"] / 1e6,
                "broken": first["broken"],
            }
        )
        print(json.dumps(lines[-1]), file=sys.stderr)
    best = {key: max(line[key] for line in lines) for key in ("bare_per_second", "first_per_second")}
    best["ratio"] = best["first_per_second"] / best["bare_per_second"]
    middle = {key: statistics.median(line[key] for line in lines) for key in lines[0]}
    return {"rounds": lines, "median": middle, "best": best}


def measure_large(work: Path, gibibytes: float) -> dict[str, Any]:
    """A large set: a thousand pictures, linked under many names and enlarged."""
    count = int(gibibytes * 2**30) // (3 * LARGE_SIDE**2) + 1
    write_pictures(work / "source", 1_000)
    source = sorted((work / "source").rglob("*.png"))
    for number in range(count):
        picture = source[number % len(source)]
        path = work / "large" / picture.relative_to(work / "source").with_name(f"{number:06}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(picture, path)
    first, again = (load(work / "large", work / "large cache", watched=True, size=LARGE_SIDE) for _ in range(2))
    return {
        "pictures": count,
        "gibibytes": first["bytes"] / 2**30,
        "first_seconds": first["scan"] + first["load"],
        "first_anonymous_mb": first["Pss_Anon"] / 1e6,
        "restart_seconds": again["scan"] + again["load"],
        "restart_anonymous_mb": again["Pss_Anon"] / 1e6,
    }


def to_markdown(result: dict[str, Any]) -> str:
    middle, best, rounds, large = result["median"], result["best"], len(result["rounds"]), result["large"]
    share = f"{middle['ratio']:.0%} ({best['ratio']:.0%})"

    def speed(key: str) -> str:
        return f"{middle[key]:,.0f} ({best[key]:,.0f})"

    return f"""# Your own pictures: reading cost

Written by `{result["command"]}` on {result["machine"]}, on a machine that was busy with other work.
{result["pictures"]:,} color PNG files of {SIDE}x{SIDE} pixels; medians of {rounds} rounds, in which all programs take turns.
The bare loop is two processes that open each file with Pillow, convert it to RGB and make an array of it. Starting them and
listing their files is not included in their time; it is included in ours.

| what | measured | goal |
|---|---|---|
| bare loop of two processes, pictures per second, median (best round) | {speed("bare_per_second")} | |
| first start (scan, decode, write the cache), pictures per second, median (best round) | {speed("first_per_second")} | |
| first start relative to the bare loop: median of rounds (best round against best round) | {share} | at least {RATIO:.0%} |
| bare loop, processor time per picture, us | {middle["bare_processor_us"]:.0f} | |
| first start, processor time per picture, workers and their start included, us | {middle["first_processor_us"]:.0f} | |
| first start, scanning only, s | {middle["scan_seconds"]:.2f} | |
| start with a cache (scan and map), s | {middle["restart_seconds"]:.2f} | under {RESTART:.0f} |
| preflight report (duplicates included), s | {middle["preflight_seconds"]:.2f} | |
| first start, peak memory over {middle["pixels_mb"]:.0f} MB of pixels | {middle["first_memory"]:.2f} | at most {MEMORY} |
| start with a cache, peak memory over size of the pixels | {middle["restart_memory"]:.2f} | at most {MEMORY} |
| first start, anonymous memory, MB | {middle["first_anonymous_mb"]:.0f} | |

Memory was measured in separate starts. It is the memory of the process and its decoding workers (proportional share of all
pages, sampled every 50 ms), including a final read of all pixels. The imports of the process are subtracted, those of the
workers are not. The pixels are pages of the cache file, which the system may drop at any time.

## Large sets

{large["pictures"]:,} pictures at {LARGE_SIDE}x{LARGE_SIDE}: {large["gibibytes"]:.1f} GiB of pixels, mapped and read once.

| what | s | anonymous memory, MB |
|---|---|---|
| first start, workers included | {large["first_seconds"]:.1f} | {large["first_anonymous_mb"]:.0f} |
| start with a cache | {large["restart_seconds"]:.2f} | {large["restart_anonymous_mb"]:.0f} |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=60_000, help="number of small pictures")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each measurement")
    parser.add_argument("--gibibytes", type=float, default=4, help="pixels of the large set in GiB")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="where the page is written")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        name, *arguments = options.part
        parts: dict[str, Callable[..., None]] = {"bare": bare_part, "load": load_part}
        parts[name](*arguments)
        return
    with tempfile.TemporaryDirectory(prefix="crmatch-benchmark-") as directory:
        write_pictures(Path(directory) / "pictures", options.pictures)
        result = {
            "command": " ".join(["python", "benchmarks/data.py", *sys.argv[1:]]),
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}, Pillow {PIL.__version__}",
            "pictures": options.pictures,
            **measure(Path(directory) / "pictures", Path(directory), options.pictures, options.rounds),
            "large": measure_large(Path(directory), options.gibibytes),
        }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "data.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "data.md").write_text(to_markdown(result))
    print(to_markdown(result))


if __name__ == "__main__":
    main()
