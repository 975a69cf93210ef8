#!/usr/bin/env python3
"""Time and memory of a training step of CR-Match, compared with USB, and how they grow with the work.

    python benchmarks/training.py                 # losses, speed, memory, start-up and growth: about 15 minutes
    python benchmarks/training.py --full-size     # one step of `paper` on CIFAR-10, CIFAR-100 and STL-10: 30 minutes

Both train WRN-28-2 with the recipe `usb` on the same 5,000 random images of 32x32 pixels. A unit of work is one step,
including its data. USB is `semilearn` 0.3.2 from PyPI; on first use it is installed into its own venv (benchmarks/.usb-venv
or --usb-venv). Writes docs/results/speed.json and docs/results/speed.md. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from speed_page import write_page
from turns import Contender, PeakMemory, contenders, serve, take_turns, timed, times_faster

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results"
USB_PACKAGES = (
    "torch==2.13.0 numpy pillow scikit-learn scipy tensorboard progress ruamel.yaml tqdm huggingface_hub safetensors pyyaml",
    "--no-deps semilearn==0.3.2 timm==1.0.30 torchvision==0.28.0",
)
LABELED_BATCHES = (64, 16)
"""Labeled images per step. A step has 19 times as many images: 64 + 448 + 448 + 4 * 64 = 1,216, and 304."""
IMAGES_PER_LABELED = 19
SET_SIZE = 5_000
CLASSES = 10
GROWTH = {
    "images per step": [64, 128, 256, 512, 1_216, 2_304],
    "filters of the first stage, 256 images": [16, 32, 64],
    "training images, 256 per step": [5_000, 50_000, 500_000],
}
FULL_SIZE = (("cifar10@4", False), ("cifar100@4", True), ("stl10@100", True))
"""Settings of `paper`, and whether activations are recomputed."""


def noise(folder: Path, count: int = SET_SIZE, side: int = 32, classes: int = CLASSES) -> Path:
    """A packed set of random images in `folder`."""
    from crmatch.data.packed import write_packed

    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (count, side, side, 3), dtype=np.uint8), np.arange(count) % classes
    arrays: dict[str, Any] = {
        "train_images": images,
        "train_labels": labels,
        "test_images": images[:100],
        "test_labels": labels[:100],
        "class_names": np.array([str(label) for label in range(classes)]),
    }
    write_packed(folder / "noise.npz", arrays)
    return folder / "noise.npz"


def ours(data: Path, labeled_batch: int, compiled: bool = False, **changes: Any) -> Any:
    """Our run with the recipe `usb` on the images of `data`, before its first step."""
    from crmatch.data.settings import parse_setting
    from crmatch.runs.experiment import Experiment, load_run_data
    from crmatch.spec.recipes import recipe
    from crmatch.spec.run_spec import replace
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime

    setting = parse_setting("noise@4", data.parent)
    sizes = {
        "plan.labeled_batch_size": labeled_batch,
        "plan.unlabeled_batch_size": 7 * labeled_batch,
        "method.rotation_images": labeled_batch,
    }
    spec = replace(recipe(setting, "crmatch", "usb"), **{"data.image_size": 32, **sizes, **changes})
    runtime = choose_runtime(Execution("cpu", compile=compiled), spec.precision)
    return Experiment(spec, *load_run_data(spec, setting, data.parent), runtime).training()


def command(python: str, script: str, *arguments: object) -> list[str]:
    return [python, str(HERE / script), *map(str, arguments)]


def our_command(data: Path, labeled_batch: int, compiled: bool) -> list[str]:
    mode = ["--compiled"] if compiled else []
    return command(sys.executable, "training.py", "--serve", data, "--labeled-batch", labeled_batch, *mode)


def all_commands(usb: str, data: Path, labeled_batch: int) -> dict[str, list[str]]:
    return {
        "USB": command(usb, "usb_on_cpu.py", "serve", "--data", data, "--labeled-batch", labeled_batch),
        "crmatch, eager": our_command(data, labeled_batch, compiled=False),
        "crmatch, compiled": our_command(data, labeled_batch, compiled=True),
    }


def install_usb(venv: Path) -> str:
    """The Python of USB's venv, which is created if it is missing."""
    python = venv / "bin" / "python"
    if not (venv / "installed").exists():
        print(f"installing USB into {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        for packages in USB_PACKAGES:
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages.split()], check=True)
        (venv / "installed").touch()
    return str(python)


def losses(usb: str, data: Path) -> dict[str, float]:
    """Differences of loss terms and gradients, ours against USB's, for the same weights and inputs, in float64.

    In float32, losses agree to six digits, but a few activations have different signs in the two implementations.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from crmatch.methods.base import Step
    from crmatch.randomness import generator

    training = ours(data, 16, precision="fp64")
    with torch.no_grad():  # confident enough for about half of the images
        training.network.classifier.weight.mul_(25)
    batch = training.batches.batch(0)
    names = {ours_: theirs(ours_) for ours_ in training.network.state_dict()}
    weights = {theirs_: training.network.state_dict()[ours_].contiguous() for ours_, theirs_ in names.items()}
    turned = [torch.rot90(batch.views["rotation"], quarter, (2, 3)) for quarter in range(4)]
    inputs = {
        "x_lb": batch.views["labeled"],
        "y_lb": batch.labels,
        "x_ulb_w": batch.views["weak"],
        "x_ulb_s": batch.views["strong"],
        "x_ulb_rot": torch.cat(turned),
        "rot_v": torch.arange(4).repeat_interleave(len(turned[0])),
    }
    given, out = data.with_name("given.safetensors"), data.with_name("losses.safetensors")
    tensors = {f"weight/{name}": tensor for name, tensor in weights.items()}
    save_file(tensors | {f"input/{name}": tensor.contiguous() for name, tensor in inputs.items()}, given)
    job = command(usb, "usb_on_cpu.py", "losses", "--data", data, "--labeled-batch", 16, "--given", given, "--out", out)
    subprocess.run(job, check=True, stdout=subprocess.DEVNULL)
    answer = load_file(out)
    loss = training.method.loss(batch, training.models, Step(0, 1000, lambda name: generator(0, name), 0.999))
    loss.total.backward()
    gradients = {names[name]: value.grad for name, value in training.network.named_parameters() if value.grad is not None}
    terms = loss.terms
    if set(gradients) != {name.removeprefix("gradient/") for name in answer if name.startswith("gradient/")}:
        raise SystemExit("the two implementations train different parameters")
    return {
        "loss": loss.total.item(),
        "images above the threshold": float(answer["util_ratio"]),
        "difference of the loss": (loss.total - answer["total"]).abs().item(),
        "difference of the supervised term": (terms["supervised"] - answer["sup_loss"]).abs().item(),
        "difference of the pseudo-label term": (terms["pseudo_label"] - answer["unsup_loss"]).abs().item(),
        "largest difference of a gradient, relative to the largest gradient": max(
            float((value - answer[f"gradient/{name}"]).abs().max() / answer[f"gradient/{name}"].abs().max())
            for name, value in gradients.items()
            if answer[f"gradient/{name}"].abs().max() > GRADIENT_NOISE
        ),
    }


GRADIENT_NOISE = 1e-5
"""Gradients below this are zero except for rounding (biases before a norm), so their relative difference means nothing."""


def theirs(name: str) -> str:
    """USB's name of one of our parameters or buffers."""
    part, _, rest = name.partition(".")
    if part == "heads":
        return rest.replace("projection", "ds_classifier").replace("rotation", "rot_classifier")
    if part == "classifier":
        return f"backbone.{name}"
    if rest.startswith("blocks."):
        _, number, layer = rest.split(".", 2)
        layer = layer.replace("norm", "bn").replace("shortcut", "convShortcut")
        return f"backbone.block{int(number) // 4 + 1}.layer.{int(number) % 4}.{layer}"
    return "backbone." + rest.replace("stem", "conv1").replace("norm", "bn1")


def speed(usb: str, data: Path, labeled_batch: int, rounds: int) -> dict[str, Any]:
    """Each of our modes compared with USB, one pair after the other: three programs of this size do not fit into 24 GiB."""
    images = IMAGES_PER_LABELED * labeled_batch
    results: dict[str, Any] = {"images": images, "rounds": rounds, "contenders": {}}
    commands = all_commands(usb, data, labeled_batch)
    for mode in list(commands)[1:]:
        with contenders({name: commands[name] for name in ("USB", mode)}) as started:
            seconds = take_turns({name: contender.work for name, contender in started.items()}, rounds)
        for name, values in seconds.items():
            middle = statistics.median(values)
            results["contenders"][name if name == mode else f"USB beside {mode}"] = {
                "seconds": middle,
                "images_per_second": images / middle,
                "times_usb": times_faster(seconds, name, "USB"),
            }
        print(results, flush=True)
    return results


def memory_and_start(usb: str, data: Path, labeled_batch: int) -> dict[str, Any]:
    """Peak memory over three steps and all processes, and seconds until ready and of the first step; one program at a time."""
    results = {}
    for name, started in all_commands(usb, data, labeled_batch).items():
        contender = Contender(started)
        with PeakMemory(contender.process.pid) as memory:
            first = contender.work()
            for _ in range(2):
                contender.work()
        contender.end()
        results[name] = {
            "peak_bytes": memory.peak,
            "resident_bytes": memory.resident,
            "seconds_to_ready": contender.seconds_to_ready,
            "first_step": first,
        }
    return results


def import_seconds(python: str, code: str) -> float:
    def once() -> float:
        started = time.perf_counter()
        subprocess.run([python, "-c", code], check=True, capture_output=True)
        return time.perf_counter() - started

    return min(once() for _ in range(3))


def first_step_seconds() -> float:
    """From the command to the end of the first step of `crmatch train digits@4`, in a fresh directory."""
    with tempfile.TemporaryDirectory() as out:
        options = ["--out", out, "--json", "--set", "plan.log_every=1"]
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-m", "crmatch", "train", "digits@4", *options], stdout=subprocess.DEVNULL)
        while not any(file.stat().st_size for file in Path(out).rglob("metrics.jsonl")):
            time.sleep(0.01)
            if process.poll() is not None:
                raise SystemExit("crmatch train ended before its first step")
        seconds = time.perf_counter() - started
        process.kill()
        process.wait()
    return seconds


def growth(folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds per image of our eager step in each series; the runs of a series take turns."""
    results = {}
    for title, values in GROWTH.items():
        runs = {}
        for value in values:
            place = folder / f"{title[:5]}-{value}"
            place.mkdir()
            if title.startswith("images"):
                runs[str(value)] = batch_of(noise(place), value)
            elif title.startswith("filters"):
                runs[str(value)] = batch_of(noise(place), 256, **{"network.filters": value})
            else:
                runs[str(value)] = batch_of(noise(place, count=value), 256)
        seconds = take_turns({name: timed(run.take_step) for name, run in runs.items()}, rounds, warmup=1)
        results[title] = [
            {"value": value, "seconds_per_image": statistics.median(seconds[str(value)]) / images_of(runs[str(value)])}
            for value in values
        ]
    return results


def batch_of(data: Path, images: int, **changes: Any) -> Any:
    """A run with `images` images per step: an eighth is labeled, the rest are weak and strong pairs, none is rotated."""
    return ours(data, images // 8, **{"plan.unlabeled_batch_size": images * 7 // 16, "method.rotation_weight": 0.0, **changes})


def images_of(training: Any) -> float:
    return float(training.images / training.step)


def augmentation_share(data: Path, rounds: int) -> float:
    training = ours(data, 64)
    seconds = take_turns(
        {"batch": timed(lambda: training.batches.batch(0)), "step": timed(training.take_step)}, rounds, warmup=1
    )
    return statistics.median(seconds["batch"]) / statistics.median(seconds["step"])


def convolution_share(data: Path, labeled_batch: int, rounds: int) -> float:
    """Share of a step that its convolution kernels take, called one after the other with nothing in between."""
    from convolutions import kernels_of

    training = ours(data, labeled_batch)
    kernels = kernels_of(training.take_step)
    seconds = take_turns({"kernels": timed(kernels), "step": timed(training.take_step)}, rounds, warmup=1)
    return statistics.median(seconds["kernels"]) / statistics.median(seconds["step"])


def full_size(setting_name: str, recompute: bool) -> dict[str, Any]:
    """Time and memory of one step of `paper` on random images; runs in its own process."""
    import torch

    from crmatch.data.images import DataSet, ImageSet
    from crmatch.data.settings import parse_setting
    from crmatch.data.splits import make_split
    from crmatch.runs.experiment import Experiment
    from crmatch.spec.recipes import recipe
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime

    setting = parse_setting(setting_name)
    spec = recipe(setting, "crmatch", "paper")
    side, classes = spec.data.image_size, {"cifar100": 100}.get(setting.data, CLASSES)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (SET_SIZE, 3, side, side), dtype=torch.uint8, generator=random)
    train = ImageSet(images, torch.arange(SET_SIZE) % classes, tuple(map(str, range(classes))))
    data = DataSet(train, None)
    split = make_split(data, setting.labels_per_class, 1, "balanced", spec.data.unlabeled)
    training = Experiment(spec, data, split, choose_runtime(Execution("cpu", recompute=recompute))).training()
    started = time.perf_counter()
    training.take_step()
    seconds = time.perf_counter() - started
    peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "setting": setting_name,
        "recompute": recompute,
        "images": training.images,
        "image_size": side,
        "filters": getattr(spec.network, "filters", None),
        "seconds": seconds,
        "peak_bytes": peak * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of each measurement")
    parser.add_argument("--usb-venv", type=Path, default=HERE / ".usb-venv", help="venv of USB")
    parser.add_argument("--full-size", action="store_true", help="only measure one step of `paper` for each setting")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from docs/results/speed.json")
    for hidden in ("--serve", "--one-step"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--labeled-batch", type=int, default=64, help=argparse.SUPPRESS)
    for flag in ("--compiled", "--recompute"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(ours(Path(options.serve), options.labeled_batch, options.compiled).take_step)
        return
    if options.one_step:
        print(json.dumps(full_size(options.one_step, options.recompute)))
        return
    file = RESULTS / "speed.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if options.full_size:
        results["full_size"] = [
            json.loads(subprocess.run(one_step(*case), check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            for case in FULL_SIZE
        ]
    elif not options.page:
        results |= compare(install_usb(options.usb_venv), options.rounds)
    file.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results, RESULTS / "speed.md")


def one_step(setting: str, recompute: bool) -> list[str]:
    return command(sys.executable, "training.py", "--one-step", setting, *["--recompute"] * recompute)


def compare(usb: str, rounds: int) -> dict[str, Any]:
    from crmatch.training.execution import Execution
    from crmatch.training.runtime import choose_runtime, describe_machine

    with tempfile.TemporaryDirectory() as name:
        data = noise(Path(name))
        return {
            "machine": describe_machine(choose_runtime(Execution("cpu"))) | {"cores": os.cpu_count()},
            "losses": losses(usb, data),
            "speed": [speed(usb, data, batch, rounds) for batch in LABELED_BATCHES],
            "memory": memory_and_start(usb, data, LABELED_BATCHES[0]),
            "import_seconds": {
                "USB": import_seconds(
                    usb,
                    f"import sys; sys.path.insert(0, {str(HERE)!r}); import usb_on_cpu as u; "
                    "u.import_torchvision(); sys.meta_path.insert(0, u.UnusedPackages()); import semilearn",
                ),
                "crmatch": import_seconds(sys.executable, "import crmatch"),
                "crmatch with its loop": import_seconds(sys.executable, "import crmatch.runs.experiment"),
                "crmatch --help": import_seconds(
                    sys.executable, "from crmatch.__main__ import main; import sys; sys.argv = ['crmatch', '--help']; main()"
                ),
            },
            "first_step_seconds": min(first_step_seconds() for _ in range(3)),
            "augmentation_share": augmentation_share(data, 5),
            "convolution_share": {
                str(IMAGES_PER_LABELED * batch): convolution_share(data, batch, rounds) for batch in LABELED_BATCHES
            },
            "growth": growth(Path(name), 3),
        }


if __name__ == "__main__":
    main()
