"""What a run costs, estimated from its spec alone: images per step, time and memory; and whether it fits. Imports no torch.

Time = steps * images per step * seconds per image. Seconds per image are interpolated over the network's multiply-adds between
three measured networks (log-log scale; proportional beyond them). They were measured with two threads; other numbers of threads
are assumed to be proportionally faster or slower. Methods that pass images through the network several times per step
(MixMatch, VAT) take longer than estimated. Memory = process + weights + activations kept for the backward pass.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from pathlib import Path
from typing import NamedTuple

from crmatch.data.folder.workers import available_cores
from crmatch.data.official.catalog import CATALOG
from crmatch.data.settings import Setting
from crmatch.errors import RequestError
from crmatch.networks.config import (
    SLICE_BYTES,
    AnyNetwork,
    FastNetConfig,
    OwnNetworkConfig,
    PretrainedConfig,
    ResNet18Config,
    WideResNetConfig,
)
from crmatch.networks.pretrained.catalog import (
    EFFICIENTNET_LITE,
    OUT_CHANNELS,
    efficientnet_lite_blocks,
    onnxruntime_is_installed,
)
from crmatch.spec.run_spec import RunSpec, replace
from crmatch.training.execution import Activations

logger = logging.getLogger(__name__)
IGNORE = "CRMATCH_IGNORE_MEMORY"  # environment variable; 1 trains although the estimate exceeds the free memory
STEM_CHANNELS = 16
# (multiply-adds, seconds) per image with two threads of a server CPU without AVX-512, with which it takes about half as long:
# digits by `quick`, svhn_small by `quick` at 24 pixels, CIFAR-10 by `paper`.
MEASURED = ((5.59e6, 0.028 / 104), (17.3e6, 0.067 / 104), (214e6, 39 / 2304))
MEASURED_THREADS = 2
# Seconds per multiply-add of a forward pass by onnxruntime: 90,000 views of cifar10_small at 96 pixels took 120 s.
FEATURE_SECONDS = 1.9e-11
TRAINING_FACTOR = 3.0  # time of a training image by torch, the first third of the network frozen, in such forward passes
HEADS_SECONDS = 15.0  # to start, to train two heads and to cross-validate them
USEFUL_STEPS = 400  # of tuning, for which the image size must leave time
# Two assumptions about a GPU: FixMatch's 2^20 steps take two to three days, and launches bound a step from below.
GPU_OPERATIONS, GPU_STEP_SECONDS = 6e12, 0.03
# Bytes of activations per convolution output and image. Wide ResNets: `lean` from peaks of 3.1 GB in steps of 1,216 images of
# WRN-28-2, 32x32, and of 5.4 GB at 2,304; `kept` from 5.4 GB at 1,216 images, compiled (not measured on a GPU).
BYTES_PER_OUTPUT = {"kept": 7.7, "lean": 4.1, "resnet18": 10.7}
# The same with recomputing, per output of the largest convolution only: 18.8 GB at 2,304 images of 96x96, WRN-37-2.
RECOMPUTED_BYTES = 27.0
SLICES = 20  # parts of a batch that exist at once inside lean convolutions, allocator gaps included (fitted to measured peaks)
PROCESS_BYTES = 0.35e9  # interpreter, torch and a small data set
BYTES_PER_WEIGHT = 16  # weight, gradient, momentum and EMA weight in float32
ACTIVATION_SIZE = {"fp64": 2.0, "fp32": 1.0, "bf16": 0.5, "fp16": 0.5}
# Control groups v2 and v1: controller -> its folder, files of limit and usage, key of reclaimable memory in memory.stat.
CGROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class Layer(NamedTuple):
    """A convolution: its weights, and the pixels and channels of its output."""

    weights: int
    pixels: int
    channels: int


class Cost(NamedTuple):
    """Estimated cost of a run; seconds are None if its network, or (as steps) the size of its data, is not known."""

    images_per_step: int
    steps: int | None
    cpu_seconds: float | None  # with the threads in use
    gpu_seconds: float | None
    memory_bytes: float


def estimate(spec: RunSpec, setting: Setting, activations: Activations = "lean") -> Cost:
    """Estimate the cost of `spec`; its memory depends on the activations that are stored for the backward pass."""
    layers = network_layers(spec.network, setting.channels, spec.data.image_size)
    steps, plan = spec.plan.steps, spec.plan
    cpu, gpu = _step_seconds(spec, layers)
    if plan.start_size is not None:  # the first steps have smaller images
        small_cpu, small_gpu = _step_seconds(spec, network_layers(spec.network, setting.channels, plan.start_size))
        cpu += plan.start_share * (small_cpu - cpu)
        gpu += plan.start_share * (small_gpu - gpu)
    if steps is None and (known := CATALOG.get(setting.data)):
        first_stage = spec.method.first_stage(setting.labels_per_class * known.classes)
        steps = spec.plan.total_steps(known.counts["train"] + known.counts.get("unlabeled", 0), first_stage.steps)
    weights = sum(layer.weights for layer in layers) * BYTES_PER_WEIGHT * max(1.0, ACTIVATION_SIZE[spec.precision])
    return Cost(
        images_per_step=images_per_step(spec),
        steps=steps,
        cpu_seconds=steps * cpu if steps and layers else None,
        gpu_seconds=steps * gpu if steps and layers else None,
        memory_bytes=PROCESS_BYTES + weights + _activation_bytes(spec, layers, activations),
    )


def _step_seconds(spec: RunSpec, layers: list[Layer]) -> tuple[float, float]:
    """Seconds of a step on this CPU, with the threads in use, and on one GPU."""
    images, multiply_adds = images_per_step(spec), sum(layer.weights * layer.pixels for layer in layers)
    on_gpu = max(GPU_STEP_SECONDS, images * multiply_adds * 6 / GPU_OPERATIONS)
    return images * _seconds_per_image(multiply_adds) if layers else 0.0, on_gpu


def _activation_bytes(spec: RunSpec, layers: list[Layer], activations: Activations) -> float:
    images = images_per_step(spec) * ACTIVATION_SIZE[spec.precision]
    outputs = [layer.channels * layer.pixels for layer in layers]
    if not layers or getattr(spec.network, "train", None) == "head":  # nothing known, or no backward pass
        return 0.0
    plain = not isinstance(spec.network, WideResNetConfig)
    kind = "resnet18" if plain else "kept" if activations == "kept" else "lean"
    per_image = BYTES_PER_OUTPUT[kind] * sum(outputs)
    if activations == "recomputed":
        per_image = min(per_image, RECOMPUTED_BYTES * max(outputs))
    return images * per_image + SLICES * min(SLICE_BYTES, 4 * images * max(outputs))


def images_per_step(spec: RunSpec) -> int:
    """Images that pass through the network in a step: those of all views, and what the method adds (rotated copies)."""
    plan, method = spec.plan, spec.method
    sizes = {"labeled": plan.labeled_batch_size, "unlabeled": plan.unlabeled_batch_size, "extra": method.extra_batch_size}
    return sum(sizes[view.source] for view in method.views) + method.extra_images(sizes["labeled"], sizes["unlabeled"])


def threads_in_use() -> int:
    """Threads that torch will use on a CPU, known without importing it."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else available_cores()


def _seconds_per_image(multiply_adds: float) -> float:
    """Seconds of a training step per image, with the threads in use."""
    speedup = threads_in_use() / MEASURED_THREADS
    for (left, before), (right, after) in itertools.pairwise(MEASURED):
        if left < multiply_adds <= right:
            return float(before * (after / before) ** (math.log(multiply_adds / left) / math.log(right / left))) / speedup
    nearest, seconds = MEASURED[0] if multiply_adds <= MEASURED[0][0] else MEASURED[-1]
    return seconds * multiply_adds / nearest / speedup


def network_layers(network: AnyNetwork, channels: int, side: int) -> list[Layer]:
    """Every convolution of the backbone for square images of `side` pixels, without building it (no torch); [] if unknown."""
    if isinstance(network, OwnNetworkConfig):
        return []
    if isinstance(network, PretrainedConfig):
        return _efficientnet_layers(network.backbone, side) if network.backbone in EFFICIENTNET_LITE else []
    if isinstance(network, FastNetConfig):
        return _fast_layers(network, channels, side)
    if isinstance(network, ResNet18Config):
        kernel, width_before, side = 7, 64, math.ceil(side / 2)
        stages = [(64, 2, 2), (128, 2, 2), (256, 2, 2), (512, 2, 2)]  # stride 2 of the first stage: the max-pooling
    else:
        kernel, width_before = 3, STEM_CHANNELS
        strides = [network.first_stride, *[2] * (network.scales - 1)]
        stages = [(network.filters * 2**stage, network.repeat, stride) for stage, stride in enumerate(strides)]
    layers = [Layer(kernel**2 * channels * width_before, side**2, width_before)]
    for width, blocks, stride in stages:
        side = math.ceil(side / stride)
        for _ in range(blocks):
            layers += [Layer(9 * width_before * width, side**2, width), Layer(9 * width * width, side**2, width)]
            layers += [Layer(width_before * width, side**2, width)] if width_before != width else []  # the shortcut
            width_before = width
    return layers


def _fast_layers(network: FastNetConfig, channels: int, side: int) -> list[Layer]:
    before, side = 8 * channels, side - 1
    layers = [Layer(4 * channels * before, side**2, before)]
    for width in (network.filters, 4 * network.filters, 4 * network.filters):
        layers.append(Layer(9 * before * width, side**2, width))
        before, side = width, max(1, side // 2)
        layers.append(Layer(9 * width * width, side**2, width))
    return layers


def pretrained_seconds(spec: RunSpec, images: int, steps: int = USEFUL_STEPS) -> float:
    """Seconds of a run with a pretrained backbone: features of `images` pictures, and so many steps of tuning."""
    assert isinstance(spec.network, PretrainedConfig)
    views = images * (1 + spec.network.weak_views + spec.network.strong_views)
    return feature_seconds(spec, views) + (tuning_seconds(spec, steps) if spec.network.train == "all" else 0.0)


def feature_seconds(spec: RunSpec, views: int) -> float:
    """Seconds to compute the features of so many views; 0 if the network is not known."""
    return views * _forward_seconds(spec) * (1.0 if onnxruntime_is_installed() else 2.5)


def tuning_seconds(spec: RunSpec, steps: int) -> float:
    """Seconds to train a pretrained network for so many steps; 0 if it is not known."""
    return steps * images_per_step(spec) * TRAINING_FACTOR * _forward_seconds(spec)


def _forward_seconds(spec: RunSpec) -> float:
    layers = network_layers(spec.network, 3, spec.data.image_size)
    return sum(layer.weights * layer.pixels for layer in layers) * FEATURE_SECONDS * MEASURED_THREADS / threads_in_use()


def describe_size(spec: RunSpec, setting: Setting, images: int, reason: str = "", minutes: float | None = None) -> str:
    """The image size of a run on a folder in one sentence, with what another size would cost."""
    size, pretrained = spec.data.image_size, isinstance(spec.network, PretrainedConfig)
    # Enlarging more than fourfold was of no use (docs/results/backbones.md).
    useful = [side for side in (224, 160, 128, 96) if side != size and side <= 4 * setting.image_size]
    other = (useful or [224])[0] if pretrained else 2 * size

    def seconds(side: int) -> float:
        resized = replace(spec, **{"data.image_size": side})
        if not pretrained:
            return max(1.0, estimate(resized, setting).cpu_seconds or 1.0)
        found = pretrained_seconds(resized, images, spec.plan.steps or USEFUL_STEPS)
        return HEADS_SECONDS + found if found else 0.0

    used = f"Pictures of about {setting.image_size} px are used at {size} px{reason}"
    if minutes:
        return f"{used}. Training takes about {duration(60 * minutes)}, as asked for."
    if not seconds(size):
        return f"{used}. Choose another size with --image-size."
    times = f"about {duration(seconds(size))}; at {other} px it would take {duration(seconds(other))}"
    return f"{used}. Training takes {times} {on_cpu()} (--image-size {other})."


def _efficientnet_layers(backbone: str, side: int) -> list[Layer]:
    side = math.ceil(side / 2)
    blocks = efficientnet_lite_blocks(EFFICIENTNET_LITE[backbone].size)
    layers = [Layer(27 * blocks[0].channels, side**2, blocks[0].channels)]
    for block in blocks:
        inner = block.channels * block.expansion
        layers += [Layer(block.channels * inner, side**2, inner)] if block.expansion > 1 else []
        side = math.ceil(side / block.stride)
        layers += [Layer(block.kernel**2 * inner, side**2, inner), Layer(inner * block.width, side**2, block.width)]
    return [*layers, Layer(blocks[-1].width * OUT_CHANNELS, side**2, OUT_CHANNELS)]


DAY = 86400.0


def duration(seconds: float) -> str:
    """Seconds in a unit that fits: "45 s", "12 min", "5.2 h", "3.1 days", "61 years"."""
    units = ((90, "s", 1.0), (90 * 60, "min", 60.0), (1.5 * DAY, "h", 3600.0), (700 * DAY, "days", DAY))
    unit, length = next(((unit, length) for limit, unit, length in units if seconds < limit), ("years", 365.25 * DAY))
    value = seconds / length
    return f"{value:.{int(length > 60 and value < 10)}f} {unit}"


def describe_cost(cost: Cost, lengths: bool = True) -> str:
    """A cost in words; `lengths` adds the number of steps and of images per step."""
    memory = f"{cost.memory_bytes / 1e9:.1f} GB of memory"
    if cost.steps is None:
        return f"time depends on its number of epochs, {cost.images_per_step:,} images per step, {memory}"
    what = f"{cost.steps:,} steps of {cost.images_per_step:,} images, " if lengths else ""
    if cost.cpu_seconds is None or cost.gpu_seconds is None:
        return f"{what}time and memory depend on its network"
    return f"{what}about {duration(cost.cpu_seconds)} {on_cpu()}, estimated {duration(cost.gpu_seconds)} on one GPU, {memory}"


def on_cpu() -> str:
    """Where a time of this module holds, in words."""
    threads = threads_in_use()
    return f"with {threads} thread{'s' * (threads > 1)}"


def check_memory(spec: RunSpec, setting: Setting, free: int | None, activations: Activations = "lean") -> None:
    """Raise before the first step if the run needs more memory than is free, and name what would make it fit."""

    def needed(spec: RunSpec, activations: Activations) -> float:
        # The process and its data exist already.
        return estimate(spec, setting, activations).memory_bytes - PROCESS_BYTES

    if free is None or needed(spec, activations) <= free:
        return
    found = f"this run needs about {needed(spec, activations) / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
    if os.environ.get(IGNORE) == "1":
        logger.warning("%s; it is trained because %s=1", found, IGNORE)
        return
    advice = "Use smaller images (--image-size), another network (network.filters) or smaller batches (plan.*_batch_size)."
    # Recomputing changes no result, so it comes first; then the largest batch of unlabeled images that fits, by halves.
    options: tuple[tuple[Activations, str], ...] = ((activations, ""), ("recomputed", " --recompute"))
    size = spec.plan.unlabeled_batch_size
    while size:
        smaller = replace(spec, **{"plan.unlabeled_batch_size": size})
        if fitting := [text for choice, text in options if needed(smaller, choice) <= free]:
            advice = f"Fits:{fitting[0]}{f' --set plan.unlabeled_batch_size={size}' if smaller != spec else ''}."
            break
        size //= 2
    raise RequestError(f"{found}.\n{advice} ({IGNORE}=1 trains anyway.)")


def free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process can still take: available memory, or less if a container has a limit; None: unknown."""
    found = [line.split() for line in _text(root / "proc/meminfo").splitlines() if line.startswith("MemAvailable:")]
    free = [1024 * int(words[1]) for words in found]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controller, path = line.split(":", 2)
        if controller in CGROUPS:
            folder, limit_name, usage_name, reclaimable = CGROUPS[controller]
            base = root / "sys/fs/cgroup" / folder
            group = base / path.lstrip("/")
            for place in (group, *group.parents[: len(group.relative_to(base).parts)]):  # parents' limits hold, too
                limit, usage = _text(place / limit_name).strip(), _text(place / usage_name).strip()
                if limit.isdigit() and usage.isdigit():
                    counts = dict(entry.split() for entry in _text(place / "memory.stat").splitlines())
                    free.append(max(0, int(limit) - int(usage) + int(counts.get(reclaimable, 0))))
    return min(free, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
