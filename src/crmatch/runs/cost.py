"""What a run will cost, from its spec alone: images per step, multiply-adds, seconds, memory. Imports no torch.

The model: seconds = steps * images per step * seconds per image of the network, where seconds per image follow the network's
multiply-adds between three measured networks (on the log-log line between neighbors, in proportion beyond them). Memory is that
of the activations kept for the backward pass, in proportion to the outputs of the convolutions (where they are recomputed, to
those of the largest one), and the weights. Methods that pass their images through the network more than once per step
(MixMatch, VAT) cost more than it says.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from crmatch.data.settings import Setting
from crmatch.networks.config import SLICE_BYTES, ResNet18Config, WideResNetConfig
from crmatch.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from crmatch.spec.run_spec import RunSpec

STEM_CHANNELS = 16
MEASURED = ((3.05e6, 0.088 / 288), (11.1e6, 0.190 / 288), (214e6, 39 / 2304))
"""(multiply-adds, seconds) per image on two cores of a server CPU: digits and svhn_small by `quick`, CIFAR-10 by `paper`."""
GPU_OPERATIONS = 6e12
"""Operations per second that one GPU sustains: an assumption, such that FixMatch's 2^20 steps take two to three days."""
GPU_STEP_SECONDS = 0.03
"""The shortest step of a GPU, whatever the network: launches and augmentation; an assumption too."""
BYTES_PER_OUTPUT = {"wide_resnet": 4.1, "resnet18": 10.7}
"""Kind of network -> bytes per output of a convolution and image. Wide ResNets: measured peaks of 3.1 GB after three steps
of 1,216 images of WRN-28-2, 32x32, and of 5.4 GB in a step of 2,304; ResNet-18 keeps activations, too."""
KEPT_BYTES_PER_OUTPUT = {"wide_resnet": 7.7, "resnet18": 10.7}
"""The same where activations are kept (compiled: 5.4 GB at 1,216 images; on a GPU not measured)."""
PARTS = 20
"""Parts of a batch that are alive at once between two convolutions, with the gaps they leave: peaks of a step of 304 images
with parts of 2, 4 and 8 MiB were 1,133, 1,206 and 1,260 MiB."""
RECOMPUTED_BYTES_PER_OUTPUT = 27.0
"""Bytes per output of the largest convolution and image where activations are recomputed: the peak of 18.8 GB in a step
of 2,304 images of 96x96 and WRN-37-2 (WRN-28-2 with 135 filters: 22)."""
PROCESS_BYTES = 0.35e9
"""Interpreter, torch and a small data set."""
BYTES_PER_WEIGHT = 16
"""Weight, gradient, momentum and moving average in float32."""
ACTIVATION_SIZE = {"fp64": 2.0, "bf16": 0.5, "fp16": 0.5}
"""Precision -> size of an activation, where it is not that of float32."""
TRAIN_IMAGES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "svhn": 73_257,
    "stl10": 105_000,
    "mini_imagenet": 50_000,
    "digits": 1_297,
}


class Layer(NamedTuple):
    """A convolution: weights, and outputs per image."""

    weights: int
    side: int
    channels: int

    @property
    def outputs(self) -> int:
        """Values per image."""
        return self.channels * self.side**2

    @property
    def multiply_adds(self) -> int:
        """Per image: every weight works once at every pixel of the output."""
        return self.weights * self.side**2


class Cost(NamedTuple):
    """What a run will take; seconds are None where its length depends on data that nobody knows here."""

    images_per_step: int
    steps: int | None
    cpu_seconds: float | None
    """On two cores."""
    gpu_seconds: float | None
    memory_bytes: float


def estimate(spec: RunSpec, setting: Setting, recompute: bool = False, lean: bool = True) -> Cost:
    """The cost of `spec`: its memory where convolutions are `lean` (CPU), and where values are recomputed by blocks."""
    layers = network_layers(spec.network, setting.channels, spec.data.image_size)
    images, work = images_per_step(spec), sum(layer.multiply_adds for layer in layers)
    pool = TRAIN_IMAGES.get(setting.data)
    steps = spec.plan.steps if spec.plan.steps is not None else spec.plan.total_steps(pool) if pool else None
    return Cost(
        images_per_step=images,
        steps=steps,
        cpu_seconds=None if steps is None else steps * images * seconds_per_image(work),
        gpu_seconds=None if steps is None else steps * max(GPU_STEP_SECONDS, images * work * 6 / GPU_OPERATIONS),
        memory_bytes=PROCESS_BYTES + _weight_bytes(layers, spec.precision) + _activation_bytes(spec, layers, recompute, lean),
    )


def _weight_bytes(layers: list[Layer], precision: str) -> float:
    return sum(layer.weights for layer in layers) * BYTES_PER_WEIGHT * max(1.0, ACTIVATION_SIZE.get(precision, 1.0))


def _activation_bytes(spec: RunSpec, layers: list[Layer], recompute: bool, lean: bool) -> float:
    """What the images of a step keep for the backward pass, and the parts of them that are worked on."""
    images = images_per_step(spec) * ACTIVATION_SIZE.get(spec.precision, 1.0)
    largest = max(layer.outputs for layer in layers)
    per_output = (BYTES_PER_OUTPUT if lean else KEPT_BYTES_PER_OUTPUT)[spec.network.kind]
    kept = per_output * sum(layer.outputs for layer in layers)
    recomputed = RECOMPUTED_BYTES_PER_OUTPUT * largest
    return images * (min(kept, recomputed) if recompute else kept) + PARTS * min(SLICE_BYTES, 4 * images * largest)


def images_per_step(spec: RunSpec) -> int:
    """Images of all views of a step, with the three turned copies of each image of the rotation term."""
    plan, method = spec.plan, spec.method
    sizes = {"labeled": plan.labeled_batch_size, "unlabeled": plan.unlabeled_batch_size, "extra": method.extra_batch_size}
    return sum(sizes[view.source] for view in method.views) + method.extra_images(sizes["labeled"], sizes["unlabeled"])


def seconds_per_image(multiply_adds: float) -> float:
    """Of one training step on two cores: see the module's docstring."""
    (first, low), (last, high) = MEASURED[0], MEASURED[-1]
    if multiply_adds <= first:
        return low * multiply_adds / first
    for (left, before), (right, after) in itertools.pairwise(MEASURED):
        if multiply_adds <= right:
            share = math.log(multiply_adds / left) / math.log(right / left)
            return float(before * (after / before) ** share)
    return high * multiply_adds / last


def network_layers(network: WideResNetConfig | ResNet18Config, channels: int, side: int) -> list[Layer]:
    """Every convolution of the backbone for square images of `side` pixels."""
    if isinstance(network, ResNet18Config):
        side = math.ceil(side / 2)
        layers = [Layer(7 * 7 * channels * 64, side, 64)]
        before, side = 64, math.ceil(side / 2)
        stages = [(64 * 2**stage, 2, 2 if stage else 1) for stage in range(4)]
    else:
        layers, before = [Layer(9 * channels * STEM_CHANNELS, side, STEM_CHANNELS)], STEM_CHANNELS
        strides = [network.first_stride, *[2] * (network.scales - 1)]
        stages = [(network.filters * 2**stage, network.repeat, stride) for stage, stride in enumerate(strides)]
    for width, blocks, stride in stages:
        side = math.ceil(side / stride)
        for _ in range(blocks):
            layers += [Layer(9 * before * width, side, width), Layer(9 * width * width, side, width)]
            layers += [Layer(before * width, side, width)] if before != width else []
            before = width
    return layers


def duration(seconds: float) -> str:
    """Seconds in words that fit their size: "45 s", "12 min", "5.2 h", "3.1 days"."""
    for limit, unit, length in ((90, "s", 1), (90 * 60, "min", 60), (36 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.2g} {unit}" if unit == "h" else f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"


def describe_cost(cost: Cost, lengths: bool = True) -> str:
    """A cost in words; what nobody measured is called an estimate."""
    what = f"{cost.steps:,} steps of {cost.images_per_step:,} images, " if lengths and cost.steps else ""
    if cost.cpu_seconds is None or cost.gpu_seconds is None:
        return f"as long as its number of epochs; {cost.images_per_step:,} images a step, {cost.memory_bytes / 1e9:.1f} GB"
    cpu, gpu = duration(cost.cpu_seconds), duration(cost.gpu_seconds)
    return f"{what}about {cpu} on two cores, estimated {gpu} on one GPU, {cost.memory_bytes / 1e9:.1f} GB of memory"
