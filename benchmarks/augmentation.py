"""Speed of the batched augmentation against an image-by-image Pillow pipeline with the same draws, on one thread.

    python benchmarks/augmentation.py [--rounds 15] [--out docs/results]

Prints the tables and writes augmentation.json and augmentation.md. The pipelines take turns within one run, because timings
on shared machines vary by a factor of two from minute to minute. The Pillow pipeline is the one that the tests use as
reference.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_sample_images
from torch import Tensor
from turns import take_turns, timed, times_faster

from crmatch.augment.kernels.geometry import crop_and_mirror
from crmatch.augment.operations import OPERATION_NAMES
from crmatch.augment.randaugment import Draws, RandAugment
from crmatch.training.runtime import keep_freed_memory

ROOT = Path(__file__).resolve().parents[1]
BATCH_SIZES = (16, 64, 448, 1024, 2048)
IMAGE_SIZES = (16, 32, 64, 96, 128, 224)


class Work(NamedTuple):
    """A batch, its random draws, and the padding of the weak view."""

    images: Tensor
    top: Tensor
    left: Tensor
    mirrored: Tensor
    padding: int
    draws: Draws


POLICY = RandAugment("paper")


def prepare(count: int, side: int, seed: int = 0) -> Work:
    """Crops of scikit-learn's two photographs, with the draws of the paper's weak and strong views."""
    generator = torch.Generator().manual_seed(seed)
    photos = [torch.tensor(photo).permute(2, 0, 1) for photo in load_sample_images().images]
    corners = torch.stack([torch.randint(photos[0].shape[axis] - side, (count,), generator=generator) for axis in (1, 2)])
    images = torch.stack(
        [photos[i % 2][:, y : y + side, x : x + side] for i, (y, x) in enumerate(corners.T.tolist())]
    ).contiguous()
    padding = side // 8
    top, left = torch.randint(2 * padding + 1, (2, count), generator=generator)
    mirrored = torch.rand(count, generator=generator) < 0.5
    return Work(images, top, left, mirrored, padding, POLICY.draw(count, side, side, generator))


def batched_weak(work: Work) -> Tensor:
    return crop_and_mirror(work.images, work.top, work.left, work.mirrored, work.padding)


def batched_strong(work: Work) -> Tensor:
    return POLICY.apply(batched_weak(work), work.draws)


def pillow_pipelines(work: Work) -> tuple[Callable[[], NDArray[np.uint8]], Callable[[], NDArray[np.uint8]]]:
    """The weak and the strong pipeline on arrays (H, W, C), as in the worker process of a data loader."""
    reference = _load_reference()
    arrays = list(work.images.permute(0, 2, 3, 1).contiguous().numpy())
    crops = list(zip(work.top.tolist(), work.left.tolist(), work.mirrored.tolist(), strict=True))
    operations = [
        [(OPERATION_NAMES[kind], value) for kind, value in zip(kinds, values, strict=True)]
        for kinds, values in zip(work.draws.operations.tolist(), work.draws.values.tolist(), strict=True)
    ]
    boxes = work.draws.boxes.tolist()
    color = POLICY.variant.cutout.color

    def weak() -> NDArray[np.uint8]:
        pairs = zip(arrays, crops, strict=True)
        return np.stack([reference.weak(array, *crop, work.padding) for array, crop in pairs])

    def strong() -> NDArray[np.uint8]:
        views = [
            reference.strong(reference.weak(array, *crop, work.padding), sequence, box, color)
            for array, crop, sequence, box in zip(arrays, crops, operations, boxes, strict=True)
        ]
        return np.stack(views)

    return weak, strong


def compare(count: int, side: int, rounds: int) -> dict[str, Any]:
    """Time our pipelines and Pillow's, after a check that they give the same pixels."""
    work = prepare(count, side)
    pillow_weak, pillow_strong = pillow_pipelines(work)
    for ours, theirs in ((batched_weak(work), pillow_weak()), (batched_strong(work), pillow_strong())):
        if not np.array_equal(ours.permute(0, 2, 3, 1).numpy(), theirs):
            raise AssertionError("the two pipelines give different pixels; run the tests")
    generator = torch.Generator().manual_seed(1)
    seconds = take_turns(
        {
            "weak": timed(lambda: batched_weak(work)),
            "strong": timed(lambda: batched_strong(work)),
            "draws": timed(lambda: POLICY.draw(count, side, side, generator)),
            "pillow weak": timed(pillow_weak),
            "pillow strong": timed(pillow_strong),
        },
        rounds,
    )
    result: dict[str, Any] = {"images": count, "side": side}
    for name, values in seconds.items():
        result[name] = {"microseconds_per_image": statistics.median(values) / count * 1e6}
    for name in ("weak", "strong"):
        middle, low, high = times_faster(seconds, name, f"pillow {name}")
        result[name]["times_faster"] = {"median": middle, "quartiles": [low, high]}
    return result


def growth(shapes: Sequence[tuple[int, int]], rounds: int) -> list[dict[str, float]]:
    """Microseconds per image of our pipelines for several (images, side)."""
    works = {shape: prepare(*shape) for shape in shapes}
    seconds = take_turns(
        {
            f"{name} {shape}": timed(partial(pipeline, work))
            for shape, work in works.items()
            for name, pipeline in (("weak", batched_weak), ("strong", batched_strong))
        },
        rounds,
    )
    return [
        {
            "images": shape[0],
            "side": shape[1],
            **{name: statistics.median(seconds[f"{name} {shape}"]) / shape[0] * 1e6 for name in ("weak", "strong")},
        }
        for shape in shapes
    ]


def to_markdown(result: Mapping[str, Any]) -> str:
    lines = [
        "# Augmentation: speed and exactness",
        "",
        f"Written by `{result['command']}` on {result['machine']}.",
        "One thread; medians over rounds in which all pipelines take turns. The Pillow pipeline processes one image at a time",
        "with the same random draws and gives the same pixels (checked before every measurement). The strong pipeline",
        "includes the weak crop and CutOut.",
        "",
        "| batch | pipeline | Pillow, us per image | ours, us per image | times faster (quartiles) |",
        "|---|---|---|---|---|",
    ]
    for row in result["comparison"]:
        for name in ("weak", "strong"):
            faster = row[name]["times_faster"]
            low, high = faster["quartiles"]
            lines.append(
                f"| {row['images']} at {row['side']} x {row['side']} | {name} "
                f"| {row[f'pillow {name}']['microseconds_per_image']:.1f} | {row[name]['microseconds_per_image']:.1f} "
                f"| {faster['median']:.1f} ({low:.1f} to {high:.1f}) |"
            )
    draws = result["comparison"][0]["draws"]["microseconds_per_image"]
    lines += ["", f"Drawing the random numbers of a strong view takes another {draws:.1f} us per image.", ""]
    for title, key in (("batch size", "by_batch_size"), ("image size", "by_image_size")):
        lines += [f"Growth with {title}:", "", "| batch | weak, us per image | strong, us per image |", "|---|---|---|"]
        lines += [
            f"| {row['images']} at {row['side']} x {row['side']} | {row['weak']:.1f} | {row['strong']:.1f} |"
            for row in result[key]
        ]
        lines.append("")
    lines += [
        f"In a batch of 2,048, a strong view takes {result['strong_2048_over_448']:.2f} times as long as in a batch of 448.",
        "",
        "## Exactness",
        "",
        "Every operation gives exactly Pillow's pixels. Each one was compared on 10,000 images of 8 to 97 pixels, grayscale",
        "and color, over its whole value range (`tests/augment/test_operations_exact.py`): the 14 operations of RandAugment,",
        "and invert, blur, smooth, the blends, rescale with its six filters, scale and hue.",
        "",
    ]
    return "\n".join(lines)


def _load_reference() -> ModuleType:
    specification = importlib.util.spec_from_file_location(
        "pillow_pipeline", ROOT / "tests" / "reference" / "pillow_pipeline.py"
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _processor() -> str:
    names = [line.split(":")[1].strip() for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _read(path: str) -> str:
    return Path(path).read_text() if os.path.exists(path) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of each measurement")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="where the page is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every training run does
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/augmentation.py", *sys.argv[1:]]),
        "machine": f"{_processor()}, torch {torch.__version__}, Pillow {PIL.__version__}, NumPy {np.__version__}",
        "rounds": options.rounds,
        "comparison": [compare(448, 32, options.rounds), compare(64, 96, options.rounds)],
        "by_batch_size": growth([(count, 32) for count in BATCH_SIZES], options.rounds),
        "by_image_size": growth([(64, side) for side in IMAGE_SIZES], options.rounds),
    }
    by_count = {row["images"]: row["strong"] for row in result["by_batch_size"]}
    result["strong_2048_over_448"] = by_count[2048] / by_count[448]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "augmentation.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "augmentation.md").write_text(to_markdown(result))
    print(to_markdown(result))


if __name__ == "__main__":
    main()
