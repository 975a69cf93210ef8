#!/usr/bin/env python3
"""USB's own CR-Match (semilearn 0.3.2) for benchmarks/training.py and time_to_error.py, in its own venv without crmatch.

Its code is used as published. Only what does not work on a machine without a GPU is replaced: torchvision's compiled
operators, packages that are imported but not called by CR-Match, and `.cuda()`. Its loader processes (1 + 2 + 4) prepare
batches while other programs have their turn, which favors USB.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.abc
import importlib.machinery
import json
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

UNUSED = {"transformers", "torchaudio", "wandb", "aim", "skimage"}
HOOKS = {"EMAHook", "ParamUpdateHook", "DistSamplerSeedHook", "FixedThresholdingHook"}
"""The hooks of a training step. Logging, evaluation and checkpoints are not measured, neither for USB nor for us."""


class UnusedPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides empty modules for packages that are imported but never called."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """An empty package for the names in `UNUSED`, None for others."""
        unused = fullname.partition(".")[0] in UNUSED
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if unused else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module that has every attribute."""
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": lambda self, *args, **options: None})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def import_torchvision() -> None:
    """Import torchvision although its compiled operators do not load with this torch."""
    library: Any = torch.library
    dispatch: Any = torch._C
    keep = library.register_fake, dispatch._dispatch_has_kernel_for_dispatch_key, library.Library.impl
    _, has_kernel, implement = keep
    operators = library.Library("torchvision", "DEF")
    operators.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    library.register_fake = lambda *args, **options: lambda function: function
    dispatch._dispatch_has_kernel_for_dispatch_key = lambda name, key: name.startswith("torchvision") or has_kernel(name, key)
    library.Library.impl = lambda self, *args, **options: (
        None if self.ns == "torchvision" else implement(self, *args, **options)
    )
    try:
        importlib.import_module("torchvision")
    finally:
        library.register_fake, dispatch._dispatch_has_kernel_for_dispatch_key, library.Library.impl = keep
    import_torchvision.operators = operators  # type: ignore[attr-defined]  # if the library were garbage-collected, its operators would go too


def build(
    data: str, labeled_batch: int, workers: int, labeled: list[int] | None = None, steps: int = 2**20, ema: float = 0.999
) -> Any:
    """USB's algorithm on the images of a packed file, with the settings of its CIFAR-10 configuration.

    `labeled` are the labeled images, by default the first four of each class; `steps` is the length of the schedule.
    """
    warnings.filterwarnings("ignore")
    import_torchvision()
    sys.meta_path.insert(0, UnusedPackages())
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]
    from semilearn.algorithms import get_algorithm
    from semilearn.core.algorithmbase import AlgorithmBase
    from semilearn.core.utils import get_net_builder
    from semilearn.datasets.augmentation import RandAugment
    from semilearn.datasets.cv_datasets.datasetbase import BasicDataset
    from semilearn.lighting.config import get_config
    from torchvision import transforms

    packed = np.load(data)
    images, labels = packed["train_images"], packed["train_labels"].astype(np.int64)
    classes, side = int(labels.max()) + 1, images.shape[1]
    if labeled is None:
        labeled = np.concatenate([np.flatnonzero(labels == label)[:4] for label in range(classes)]).tolist()
    to_tensor = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop = [
        transforms.Resize(side),
        transforms.RandomCrop(side, padding=side // 8, padding_mode="reflect"),
        transforms.RandomHorizontalFlip(),
    ]
    weak, strong = transforms.Compose([*crop, *to_tensor]), transforms.Compose([*crop, RandAugment(3, 5), *to_tensor])

    def set_dataset(self: Any) -> dict[str, Any]:
        self.args.ulb_dest_len, self.args.lb_dest_len = len(images), len(labeled)
        return {
            "train_lb": BasicDataset("crmatch", images[labeled], labels[labeled], classes, weak, False, None),
            "train_ulb": BasicDataset("crmatch", images, labels, classes, weak, True, strong),
            "eval": BasicDataset("crmatch", images[:100], labels[:100], classes, weak, False, None),
            "test": None,
        }

    AlgorithmBase.set_dataset = set_dataset
    settings = {
        "algorithm": "crmatch", "net": "wrn_28_2", "net_from_name": False, "num_classes": classes, "dataset": "cifar10",
        "batch_size": labeled_batch, "uratio": 7, "use_cat": True, "img_size": side, "crop_ratio": 0.875,
        "num_labels": len(labeled), "num_train_iter": steps, "epoch": max(1, steps // 2**10),
        "num_eval_iter": 2**30, "num_log_iter": 2**30,
        "num_workers": workers, "train_sampler": "RandomSampler", "optim": "SGD", "lr": 0.03, "weight_decay": 5e-4,
        "ema_m": ema, "clip_grad": 0, "amp": False, "p_cutoff": 0.95, "hard_label": True, "rot_loss_ratio": 1.0, "gpu": None,
        "distributed": False, "world_size": 1, "rank": 0, "multiprocessing_distributed": False, "seed": 0,
        "save_dir": tempfile.gettempdir(), "save_name": "usb", "overwrite": True, "resume": False, "use_pretrain": False,
        "pretrain_path": "",
    }  # fmt: skip
    algorithm = get_algorithm(get_config(settings), get_net_builder("wrn_28_2", False), None, logging.getLogger("usb"))
    algorithm._hooks = [hook for hook in algorithm._hooks if type(hook).__name__ in HOOKS]
    algorithm.hooks_dict = {
        name: hook for name, hook in algorithm.hooks_dict.items() if name == "MaskingHook" or type(hook).__name__ in HOOKS
    }
    return algorithm


def before_each_step(algorithm: Any, call: Callable[[], None]) -> None:
    """Call `call` before every training step."""
    original = algorithm.train_step

    @functools.wraps(original)  # its process_batch reads the signature
    def step(*args: Any, **options: Any) -> Any:
        call()
        return original(*args, **options)

    algorithm.train_step = step


class EndOfInputError(Exception):
    """No more steps are requested: the input has ended, or the time is over."""


def curve(algorithm: Any, data: str, minutes: float, points: int) -> None:
    """Train for so many minutes and print a line `seconds steps error` per point; evaluation is not part of the time."""
    import time

    packed = np.load(data)
    pixels = torch.from_numpy(packed["test_images"]).permute(0, 3, 1, 2).contiguous() / 255
    mean, deviation = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images, labels = (pixels - mean) / deviation, torch.from_numpy(packed["test_labels"].astype(np.int64))
    seconds, steps, reported = 0.0, -1, 0
    started = time.perf_counter()

    def watch() -> None:
        nonlocal seconds, steps, reported, started
        now = time.perf_counter()
        seconds, started, steps = seconds + now - started, now, steps + 1
        if seconds < (reported + 1) / points * 60 * minutes:
            return
        reported += 1
        algorithm.ema.apply_shadow()
        algorithm.model.eval()
        with torch.no_grad():
            guesses = [algorithm.model(block)["logits"].argmax(1) for block in torch.split(images, 250)]
        algorithm.ema.restore()
        algorithm.model.train()
        print(seconds, steps, 100 * (torch.cat(guesses) != labels).float().mean().item(), flush=True)
        if reported == points:
            raise EndOfInputError
        started = time.perf_counter()

    before_each_step(algorithm, watch)
    with contextlib.suppress(EndOfInputError):
        algorithm.train()


def serve(algorithm: Any) -> None:
    """The protocol of benchmarks/turns.py around USB's own loop: a unit of work is a step with its data."""
    import time

    started: float | None = None

    def next_line() -> None:
        nonlocal started
        print("ready" if started is None else time.perf_counter() - started, flush=True)
        if not sys.stdin.readline():
            raise EndOfInputError
        started = time.perf_counter()

    before_each_step(algorithm, next_line)
    with contextlib.suppress(EndOfInputError):
        algorithm.train()


def losses(algorithm: Any, given: str, out: str) -> None:
    """USB's loss and gradients for the weights and inputs of a safetensors file, in float64."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(given)
    weights = {name.removeprefix("weight/"): tensor for name, tensor in tensors.items() if name.startswith("weight/")}
    inputs = {name.removeprefix("input/"): tensor for name, tensor in tensors.items() if name.startswith("input/")}
    algorithm.model.double().load_state_dict(weights)
    algorithm.model.train()
    outputs, logged = algorithm.train_step(**inputs)
    outputs["loss"].backward()
    answer = {
        f"gradient/{name}": parameter.grad
        for name, parameter in algorithm.model.named_parameters()
        if parameter.grad is not None
    }
    answer["total"] = outputs["loss"].detach()
    for name in ("sup_loss", "unsup_loss", "util_ratio"):
        answer[name] = torch.tensor(logged[f"train/{name}"], dtype=torch.float64)
    save_file(answer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("serve", "losses", "curve"))
    parser.add_argument("--data", required=True, help="packed images (.npz)")
    parser.add_argument("--labeled-batch", type=int, default=64, help="labeled images per step")
    parser.add_argument("--given", help="safetensors file with weights and inputs")
    parser.add_argument("--out", help="file for the losses and gradients")
    parser.add_argument("--labeled", help="JSON list of the labeled images")
    parser.add_argument("--steps", type=int, default=2**20, help="length of the schedule")
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--minutes", type=float, default=8.0, help="time of a curve")
    parser.add_argument("--points", type=int, default=10, help="evaluations of a curve")
    options = parser.parse_args()
    labeled = json.loads(options.labeled) if options.labeled else None
    workers = 0 if options.job == "losses" else 1
    algorithm = build(options.data, options.labeled_batch, workers, labeled, options.steps, options.ema)
    if options.job == "serve":
        serve(algorithm)
    elif options.job == "curve":
        curve(algorithm, options.data, options.minutes, options.points)
    else:
        losses(algorithm, options.given, options.out)


if __name__ == "__main__":
    main()
