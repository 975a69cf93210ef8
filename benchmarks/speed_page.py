"""Write the page docs/results/speed.md from the measurements of benchmarks/training.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30


def write_page(results: dict[str, Any], file: Path) -> None:
    """Write the sections for which there are measurements."""
    sections = [head(results.get("machine"))]
    if "speed" in results:
        sections += [
            speed(results["speed"], results["convolution_share"]),
            memory(results["memory"]),
            start(results),
            losses(results["losses"]),
        ]
        sections.append(growth(results["growth"], results["augmentation_share"]))
    if "restructured" in results:
        sections.append(restructured(results["restructured"]))
    if "full_size" in results:
        sections.append(full_size(results["full_size"]))
    file.write_text("\n".join(sections))


def restructured(found: dict[str, Any]) -> str:
    rows = [
        [name, f"{one['seconds']:.1f}", "{:.2f} ({:.2f} to {:.2f})".format(*one["times_usb"]), one["peak"]]
        for name, one in found["contenders"].items()
    ]
    return f"""## After the arena allocator was removed

The tables above were measured at commit 7ed868c, whose blocks had an arena allocator and in-place sums of gradients. Without
them, {found["images"]:,} images per step, eager, all three taking turns in one run ({found["rounds"]} rounds):

{table(["contender", "s per step", "times USB", "peak memory, GiB"], rows)}
Memory is 0.71 of the 4.90 GiB that the table above has for USB, which was not measured again.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def head(machine: dict[str, Any] | None) -> str:
    where = ""
    if machine:
        where = f"\nMachine: {machine['cores']} cores ({machine['processor']}), torch {machine['versions']['torch']}.\n"
    return f"""# Speed and memory of a training step

Made by `python benchmarks/training.py` and `python benchmarks/training.py --full-size`; all values are in `speed.json`.
USB is the published CR-Match of `semilearn` 0.3.2 on a CPU (`benchmarks/usb_on_cpu.py` says what had to be replaced). USB and
one of our modes are started and then take one step each in turns. Ratios are medians over rounds, with quartiles in
parentheses. The seven loader processes of USB prepare batches while the other program has its turn, which favors USB.
{where}"""


def speed(cases: list[dict[str, Any]], convolutions: dict[str, float]) -> str:
    """Steps of all programs, and the largest speedup that the same convolution kernels allow."""
    limits = []
    for case in cases:
        share = convolutions[str(case["images"])]
        of_usb = case["contenders"]["crmatch, eager"]["times_usb"][0] / share
        limits.append(
            f"{100 * share:.0f} % of an eager step of {case['images']:,} images ({of_usb:.2f} times USB if that were all)"
        )
    rows = []
    for case in cases:
        for name, of in case["contenders"].items():
            middle, low, high = of["times_usb"]
            rates = (f"{of['seconds']:.2f}", f"{1 / of['seconds']:.3f}", f"{of['images_per_second']:.0f}")
            rows.append((f"{case['images']:,}", name, *rates, f"{middle:.2f} ({low:.2f} to {high:.2f})"))
    header = ("images per step", "program", "s per step", "steps/s", "images/s", "speed relative to USB")
    return f"""## Steps

{table(header, rows)}
{cases[0]["rounds"]} rounds. Eager is the default: it needs no compiler, starts at once, and its results are bit-identical from
run to run. `--compile` is for long runs. The convolution kernels alone, called one after the other, take
{" and ".join(limits)}.
"""


def memory(contenders: dict[str, Any]) -> str:
    usb = contenders["USB"]
    rows = [
        (
            name,
            *(f"{of[key] / GIB:.2f} ({of[key] / usb[key]:.2f})" for key in ("peak_bytes", "resident_bytes")),
            f"{of['seconds_to_ready']:.1f}",
            f"{of['first_step']:.1f}",
        )
        for name, of in contenders.items()
    ]
    peaks = ("peak, shared pages counted once, GiB (relative to USB)", "peak, shared pages counted for each process")
    header = ("program", *peaks, "s until ready", "s of the first step")
    return f"""## Memory and start

{table(header, rows)}
1,216 images per step. Peaks are over three steps and all processes of a program, sampled four times a second.
"""


def start(results: dict[str, Any]) -> str:
    rows = [(name, f"{value:.2f}") for name, value in results["import_seconds"].items()]
    return f"""{table(("import (best of three)", "s"), rows)}
From `crmatch train digits@4` to the end of its first step: {results["first_step_seconds"]:.1f} s.
"""


def losses(values: dict[str, float]) -> str:
    rows = [(name, f"{value:.3g}") for name, value in values.items()]
    return f"""## The same losses

The recipe `usb` with the same weights and inputs (304 images) in both implementations, in float64:

{table(("", "value"), rows)}"""


def growth(series: dict[str, list[dict[str, float]]], share: float) -> str:
    tables = []
    for title, rows in series.items():
        header = (title, *(f"{row['value']:,.0f}" for row in rows))
        tables.append(table(header, [("ms per image", *(f"{1000 * row['seconds_per_image']:.2f}" for row in rows))]))
    by_batch = {row["value"]: row["seconds_per_image"] for row in series["images per step"]}
    together = "\n".join(tables)
    return f"""## How a step grows

Making the batch (gathering, augmentation, normalization) takes {100 * share:.1f} % of an eager step of 1,216 images.

{together}
The time per image in steps of 2,304 images is {by_batch[2304] / by_batch[256]:.2f} times that in steps of 256.
"""


def full_size(cases: list[dict[str, Any]]) -> str:
    rows = [
        (
            case["setting"],
            f"{case['filters']} filters, {case['image_size']}x{case['image_size']}",
            f"{case['images']:,}",
            "yes" if case["recompute"] else "no",
            f"{case['seconds']:.0f}",
            f"{case['peak_bytes'] / GIB:.1f}",
        )
        for case in cases
    ]
    header = ("setting", "network", "images", "--recompute", "s", "peak, GiB")
    return f"""## One step of the paper's settings

{table(header, rows)}"""
