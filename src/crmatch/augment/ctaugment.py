"""CTAugment: learns, while the network trains, how strong each operation may be.

Every operation's parameter range [0, 1] is cut into bins with a rate each. Probes, drawn uniformly, show how close the
network's prediction for an augmented labeled image comes to its label; rates follow that proximity, and training draws
only from bins whose rate is near the best. Sources: ReMixMatch; google-research/fixmatch, libml/ctaugment.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crmatch.augment.kernels.cutout import clipped_boxes, cut_out_
from crmatch.augment.kernels.resample import FILTERS
from crmatch.augment.operations import OPERATION_NAMES, OPERATIONS, apply_sequence, check_draws, check_images
from crmatch.augment.randaugment import MagnitudeTable
from crmatch.augment.variants import GEOMETRIC, Magnitude


class LearnedOperation(NamedTuple):
    """One of CTAugment's operations.

    Attributes:
        operation: the key of `OPERATIONS` that carries it out; `rescale` is completed by the name of a filter.
        bins: of each parameter.
        magnitude: value = start + rounding(span * v), with v in [0, 1], or 2v - 1 for signed operations.
    """

    operation: str
    bins: tuple[int, ...] = (17,)
    magnitude: Magnitude = Magnitude(0, 1)


LEARNED_OPERATIONS: dict[str, LearnedOperation] = {
    "autocontrast": LearnedOperation("autocontrast_blend"),
    "blur": LearnedOperation("blur"),
    "brightness": LearnedOperation("brightness", magnitude=Magnitude(0.1, 1.9)),
    "color": LearnedOperation("color", magnitude=Magnitude(0.1, 1.9)),
    "contrast": LearnedOperation("contrast", magnitude=Magnitude(0.1, 1.9)),
    "cutout": LearnedOperation("identity"),
    "equalize": LearnedOperation("equalize_blend"),
    "invert": LearnedOperation("invert_blend"),
    "identity": LearnedOperation("identity", bins=()),
    "posterize": LearnedOperation("posterize", bins=(8,), magnitude=Magnitude(1, 7.999, "truncate")),
    "rescale": LearnedOperation("rescale", bins=(17, len(FILTERS)), magnitude=Magnitude(0, 0.25)),
    "rotate": LearnedOperation("rotate", magnitude=Magnitude(0, 45, "nearest")),
    "sharpness": LearnedOperation("sharpness", magnitude=Magnitude(0.1, 1.9)),
    "shear_x": LearnedOperation("shear_x", magnitude=Magnitude(0, 0.3)),
    "shear_y": LearnedOperation("shear_y", magnitude=Magnitude(0, 0.3)),
    "smooth": LearnedOperation("smooth"),
    "solarize": LearnedOperation("solarize", magnitude=Magnitude(0, 255.999, "truncate")),
    "translate_x": LearnedOperation("translate_x", magnitude=Magnitude(0, 0.3)),
    "translate_y": LearnedOperation("translate_y", magnitude=Magnitude(0, 0.3)),
}
_NAMES = tuple(LEARNED_OPERATIONS)
_CUTOUT, _RESCALE = _NAMES.index("cutout"), _NAMES.index("rescale")
_PARAMETERS = max(len(learned.bins) for learned in LEARNED_OPERATIONS.values())
_MOST_BINS = max(max(learned.bins, default=0) for learned in LEARNED_OPERATIONS.values())
# How many bins each parameter of each operation has, (operations, parameters); 0 where there is no such parameter.
_BINS = np.array([[*learned.bins, *[0] * (_PARAMETERS - len(learned.bins))] for learned in LEARNED_OPERATIONS.values()])
_EXISTS = np.arange(_MOST_BINS) < _BINS[..., None]
_FIRST_FILTER = OPERATION_NAMES.index(f"rescale_{next(iter(FILTERS))}")
_POSITIONS = torch.tensor(
    [
        _FIRST_FILTER if learned.operation == "rescale" else OPERATION_NAMES.index(learned.operation)
        for learned in LEARNED_OPERATIONS.values()
    ]
)
_SIGNED = torch.tensor([name in OPERATIONS and OPERATIONS[name].signed for name in _NAMES])


class Draws(NamedTuple):
    """All randomness of N views, on the CPU.

    Attributes:
        choices: int64 (N, depth), positions in `LEARNED_OPERATIONS`.
        strengths: float64 (N, depth, 2), the operations' parameters in [0, 1); the second one is only rescale's.
        boxes: int64 (N, depth + 1, 4), boxes to cover after each operation, and at the end; empty if there is none.
    """

    choices: Tensor
    strengths: Tensor
    boxes: Tensor


class CTAugment:
    """The strong policy that learns; rates live on the CPU in float64."""

    def __init__(
        self,
        depth: int = 2,
        decay: float = 0.99,
        threshold: float = 0.8,
        translate: Literal["scaled", "tf"] = "scaled",
        final_cutout: bool = True,
        geometry: bool = True,
    ) -> None:
        """Start with all rates at 1.

        Args:
            depth: operations per image.
            decay: of the rates, per update.
            threshold: bins whose rate is below this share of the best are not drawn in training.
            translate: ``scaled`` moves up to 0.3 of the side. Reference: up to 0.3 pixels, which is nothing. Here: the
                share of the side, because both papers mean it; ``tf`` is the reference.
            final_cutout: whether a gray square of half the image ends every training view (FixMatch; not ReMixMatch).
            geometry: keeps or drops the operations that move pixels.
        """
        if translate not in ("scaled", "tf"):
            raise ValueError(f"unknown translate {translate!r}; known: scaled, tf")
        self.depth = depth
        self.decay = decay
        self.threshold = threshold
        self.final_cutout = final_cutout
        magnitudes = {name: learned.magnitude for name, learned in LEARNED_OPERATIONS.items()}
        if translate == "tf":
            magnitudes |= {name: Magnitude(0, 0.3, unit="pixels") for name in ("translate_x", "translate_y")}
        self._magnitudes = MagnitudeTable(_NAMES, magnitudes)
        self._pool = torch.tensor([row for row, name in enumerate(_NAMES) if geometry or name not in GEOMETRIC])
        self._rates = np.ones((len(_NAMES), _PARAMETERS, _MOST_BINS))

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Draws:
        """Draw training views: bins by their weights, uniform within a bin, v = (bin + u) / bins; then CutOut."""
        return self._draw(count, height, width, generator, probe=False)

    def draw_probe(self, count: int, height: int, width: int, generator: torch.Generator) -> Draws:
        """Draw probes: v uniform in [0, 1), no final CutOut."""
        return self._draw(count, height, width, generator, probe=True)

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """The views of `images`: uint8 (N, C, H, W) to the same, contiguous."""
        check_images(images)
        check_draws(draws.choices, images)
        choices, strengths = draws.choices.cpu(), draws.strengths.cpu()
        signed = torch.where(_SIGNED[choices], 2 * strengths[..., 0] - 1, strengths[..., 0])
        values = self._magnitudes.values(choices, signed, *images.shape[2:])
        resampling = (strengths[..., 1] * (len(FILTERS) - 0.01)).long()
        operations = _POSITIONS[choices] + torch.where(choices == _RESCALE, resampling, 0)
        for step in range(choices.shape[1]):
            images = apply_sequence(images, operations[:, step : step + 1], values[:, step : step + 1])
            images = cut_out_(images, draws.boxes[:, step])
        return cut_out_(images, draws.boxes[:, -1])

    def learn(self, draws: Draws, proximity: Tensor) -> None:
        """Update the rates: rate[bin] = decay * rate[bin] + (1 - decay) * proximity with bin = int(0.999 v bins).

        Images are taken one after the other, and each image's operations in order.

        Args:
            draws: of probes.
            proximity: (N,), 1 - 0.5 * |probabilities - onehot|_1 of each probe.
        """
        check_draws(draws.choices, proximity)
        rates = self._rates.tolist()
        for choices, strengths, close in zip(draws.choices.tolist(), draws.strengths.tolist(), proximity.tolist(), strict=True):
            for choice, values in zip(choices, strengths, strict=True):
                for rate, bins, value in zip(rates[choice], _BINS[choice].tolist(), values, strict=True):
                    if bins:
                        chosen = int(value * bins * 0.999)
                        rate[chosen] = self.decay * rate[chosen] + (1 - self.decay) * close
        self._rates = np.array(rates)

    def weights(self) -> NDArray[np.float64]:
        """How often training draws each bin, up to a factor: p = rate + 1 - decay over its maximum, 0 below threshold.

        Returns:
            (operations, parameters, bins), 0 for bins that do not exist.
        """
        weights = np.where(_EXISTS, self._rates + (1 - self.decay), 0)
        weights = weights / np.maximum(weights.max(axis=2, keepdims=True), 1 - self.decay)
        return np.where(weights < self.threshold, 0, weights)

    def rates(self) -> dict[str, list[list[float]]]:
        """The learned rates of each operation, one list per parameter; for records."""
        return {
            name: [self._rates[row, parameter, :bins].tolist() for parameter, bins in enumerate(learned.bins)]
            for row, (name, learned) in enumerate(LEARNED_OPERATIONS.items())
        }

    def state(self) -> dict[str, Tensor]:
        """What was learned, for checkpoints."""
        return {"rates": torch.from_numpy(self._rates.copy())}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        rates = state["rates"].to(torch.float64).numpy(force=True)
        if rates.shape != self._rates.shape:
            raise ValueError(f"saved rates have shape {rates.shape}, this CTAugment needs {self._rates.shape}")
        self._rates = rates.copy()

    def _draw(self, count: int, height: int, width: int, generator: torch.Generator, probe: bool) -> Draws:
        choices = self._pool[torch.randint(len(self._pool), (count, self.depth), generator=generator)]
        shape = (count, self.depth, _PARAMETERS)
        strengths = torch.rand(shape, generator=generator, dtype=torch.float64)
        spots = torch.rand(shape, generator=generator, dtype=torch.float64)
        centers = torch.rand(count, self.depth + 1, 2, generator=generator, dtype=torch.float64)
        if not probe:
            strengths = (self._draw_bins(choices, spots) + strengths) / torch.from_numpy(_BINS)[choices].clamp(min=1)
        covered = torch.full((count, self.depth + 1), -1.0, dtype=torch.float64)
        covered[:, :-1][choices == _CUTOUT] = strengths[..., 0][choices == _CUTOUT]
        if self.final_cutout and not probe:
            covered[:, -1] = 1
        sides = torch.where(covered < 0, 0, 1 + (covered * (0.499 * min(height, width))).long())
        centers = (centers * torch.tensor([height, width])).long()
        return Draws(choices, strengths, clipped_boxes(centers, sides[..., None], height, width))

    def _draw_bins(self, choices: Tensor, spots: Tensor) -> Tensor:
        """The bin in whose share of the total weight each spot in [0, 1) lies: int64 (N, depth, parameters)."""
        edges = torch.from_numpy(self.weights().cumsum(axis=2))[choices]
        bins = (spots[..., None] * edges[..., -1:] >= edges).sum(3)
        return torch.minimum(bins, (torch.from_numpy(_BINS)[choices] - 1).clamp_(min=0))
