"""CTAugment learns during training how strong each operation may be.

The range [0, 1] of each parameter of each operation is cut into bins, and each bin has a rate. Probes with uniformly drawn
strengths measure how close the prediction for an augmented labeled image comes to its label. Rates are moving averages of
this proximity, and training draws only bins whose rate is close to the best. Sources: ReMixMatch; google-research/fixmatch,
libml/ctaugment.py.
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
from crmatch.augment.operations import OPERATION_NAMES, OPERATIONS, apply_sequence
from crmatch.augment.randaugment import MagnitudeTable
from crmatch.augment.variants import Magnitude

Translation = Literal["side", "pixels"]


class LearnedOperation(NamedTuple):
    """One of CTAugment's operations."""

    operation: str  # the key of `OPERATIONS` that applies it
    bins: tuple[int, ...] = (17,)  # number of bins of each parameter
    magnitude: Magnitude = Magnitude(0, 1)  # of strength v in [0, 1], or 2v - 1 for signed operations


_FACTOR = Magnitude(0.1, 1.9)
LEARNED_OPERATIONS: dict[str, LearnedOperation] = {
    "autocontrast": LearnedOperation("autocontrast_blend"),
    "blur": LearnedOperation("blur"),
    "brightness": LearnedOperation("brightness", magnitude=_FACTOR),
    "color": LearnedOperation("color", magnitude=_FACTOR),
    "contrast": LearnedOperation("contrast", magnitude=_FACTOR),
    "cutout": LearnedOperation("identity"),  # `apply` fills its boxes
    "equalize": LearnedOperation("equalize_blend"),
    "invert": LearnedOperation("invert_blend"),
    "identity": LearnedOperation("identity", bins=()),
    "posterize": LearnedOperation("posterize", bins=(8,), magnitude=Magnitude(1, 7.999, "truncate")),
    # The second parameter chooses the filter: `apply` adds its position to that of the first one.
    "rescale": LearnedOperation(f"rescale_{next(iter(FILTERS))}", bins=(17, len(FILTERS)), magnitude=Magnitude(0, 0.25)),
    "rotate": LearnedOperation("rotate", magnitude=Magnitude(0, 45, "nearest")),
    "sharpness": LearnedOperation("sharpness", magnitude=_FACTOR),
    "shear_x": LearnedOperation("shear_x", magnitude=Magnitude(0, 0.3)),
    "shear_y": LearnedOperation("shear_y", magnitude=Magnitude(0, 0.3)),
    "smooth": LearnedOperation("smooth"),
    "solarize": LearnedOperation("solarize", magnitude=Magnitude(0, 255.999, "truncate")),
    "translate_x": LearnedOperation("translate_x", magnitude=Magnitude(0, 0.3)),
    "translate_y": LearnedOperation("translate_y", magnitude=Magnitude(0, 0.3)),
}
_NAMES = tuple(LEARNED_OPERATIONS)
_ROWS = [OPERATIONS[learned.operation] for learned in LEARNED_OPERATIONS.values()]
_CUTOUT, _RESCALE = _NAMES.index("cutout"), _NAMES.index("rescale")
_POSITIONS = torch.tensor([OPERATION_NAMES.index(learned.operation) for learned in LEARNED_OPERATIONS.values()])
_SIGNED = torch.tensor([row.signed for row in _ROWS])
_PARAMETERS = 2
# Number of bins of each parameter of each operation, (operations, parameters); 0 if there is no such parameter.
_BINS = np.array([(*learned.bins, 0, 0)[:_PARAMETERS] for learned in LEARNED_OPERATIONS.values()])
_EXISTS = np.arange(_BINS.max()) < _BINS[..., None]


class CTAugmentDraws(NamedTuple):
    """All randomness of N views, on the CPU."""

    choices: Tensor  # int64 (N, depth), positions in `LEARNED_OPERATIONS`
    strengths: Tensor  # float64 (N, depth, 2), the operations' parameters in [0, 1); only rescale has a second one
    boxes: Tensor  # int64 (N, depth + 1, 4), boxes that are filled after each operation and at the end; they may be empty


class CTAugment:
    """The strong policy that learns. Its rates are float64 arrays on the CPU."""

    def __init__(
        self,
        depth: int = 2,
        decay: float = 0.99,
        threshold: float = 0.8,
        translation: Translation = "side",
        final_cutout: bool = True,
        geometry: bool = True,
    ) -> None:
        """Start with all rates at 1.

        Args:
            depth: operations per image.
            decay: of the rates, per update.
            threshold: bins whose rate is below this fraction of the best are not drawn in training.
            translation: ``side`` moves up to 0.3 of the side, as both papers mean it; ``pixels`` up to 0.3 pixels, which
                changes nothing, as Google's code does.
            final_cutout: whether a gray square of half the image ends every training view (FixMatch; not ReMixMatch).
            geometry: whether operations that move pixels are drawn.
        """
        self.depth = depth
        self.decay = decay
        self.threshold = threshold
        self.final_cutout = final_cutout
        magnitudes = {name: learned.magnitude for name, learned in LEARNED_OPERATIONS.items()}
        if translation == "pixels":
            magnitudes |= {name: Magnitude(0, 0.3, unit="pixels") for name in ("translate_x", "translate_y")}
        self._magnitudes = MagnitudeTable(_NAMES, magnitudes)
        self._pool = torch.tensor([index for index, row in enumerate(_ROWS) if geometry or not row.geometric])
        self._rates: NDArray[np.float64] = np.ones(_EXISTS.shape)

    def draw(self, count: int, height: int, width: int, generator: torch.Generator, probe: bool = False) -> CTAugmentDraws:
        """Draw training views: bins by their weights, uniform within a bin, v = (bin + u) / bins; then CutOut.

        Probes have v uniform in [0, 1) and no final CutOut.
        """
        choices = self._pool[torch.randint(len(self._pool), (count, self.depth), generator=generator)]
        shape = (count, self.depth, _PARAMETERS)
        strengths = torch.rand(shape, generator=generator, dtype=torch.float64)
        spots = torch.rand(shape, generator=generator, dtype=torch.float64)
        centers = torch.rand(count, self.depth + 1, 2, generator=generator, dtype=torch.float64)
        if not probe:
            strengths = (self._draw_bins(choices, spots) + strengths) / torch.from_numpy(_BINS)[choices].clamp(min=1)
        covered = torch.full((count, self.depth + 1), -1.0, dtype=torch.float64)  # negative: no box
        covered[:, :-1][choices == _CUTOUT] = strengths[..., 0][choices == _CUTOUT]
        if self.final_cutout and not probe:
            covered[:, -1] = 1
        sides = torch.where(covered < 0, 0, 1 + (covered * (0.499 * min(height, width))).long())
        centers = (centers * torch.tensor([height, width])).long()
        return CTAugmentDraws(choices, strengths, clipped_boxes(centers, sides[..., None], height, width))

    def apply(self, images: Tensor, draws: CTAugmentDraws) -> Tensor:
        """Make the views of `images`: uint8 (N, C, H, W) to the same, contiguous."""
        choices, strengths = draws.choices.cpu(), draws.strengths.cpu()
        signed = torch.where(_SIGNED[choices], 2 * strengths[..., 0] - 1, strengths[..., 0])
        values = self._magnitudes.values(choices, signed, *images.shape[2:])
        resampling = (strengths[..., 1] * (len(FILTERS) - 0.01)).long()
        operations = _POSITIONS[choices] + torch.where(choices == _RESCALE, resampling, 0)
        for step in range(choices.shape[1]):
            images = apply_sequence(images, operations[:, step : step + 1], values[:, step : step + 1])
            images = cut_out_(images, draws.boxes[:, step])
        return cut_out_(images, draws.boxes[:, -1])

    def learn(self, draws: CTAugmentDraws, proximity: Tensor) -> None:
        """Update the rates: rate[bin] = decay * rate[bin] + (1 - decay) * proximity with bin = int(0.999 v bins).

        Images are processed in order, and the operations of each image too. The proximity (N,) of the probes that were
        made by `draws` is 1 - 0.5 * |probabilities - onehot|_1.
        """
        rates = self._rates.tolist()
        for choices, strengths, close in zip(draws.choices.tolist(), draws.strengths.tolist(), proximity.tolist(), strict=True):
            for choice, values in zip(choices, strengths, strict=True):
                for rate, bins, value in zip(rates[choice], _BINS[choice].tolist(), values, strict=True):
                    if bins:
                        chosen = int(value * bins * 0.999)
                        rate[chosen] = self.decay * rate[chosen] + (1 - self.decay) * close
        self._rates = np.array(rates)

    def weights(self) -> NDArray[np.float64]:
        """Unnormalized probability of each bin in training: p = (rate + 1 - decay) / its maximum, or 0 below the threshold.

        The result is (operations, parameters, bins), 0 for bins that do not exist.
        """
        weights = np.where(_EXISTS, self._rates + (1 - self.decay), 0)
        weights = weights / np.maximum(weights.max(axis=2, keepdims=True), 1 - self.decay)
        return np.where(weights < self.threshold, 0, weights)

    def rates(self) -> dict[str, list[list[float]]]:
        """The rates of each operation for a run's record, one list per parameter."""
        return {
            name: [self._rates[row, parameter, :bins].tolist() for parameter, bins in enumerate(learned.bins)]
            for row, (name, learned) in enumerate(LEARNED_OPERATIONS.items())
        }

    def state(self) -> dict[str, Tensor]:
        """The rates for a checkpoint."""
        return {"rates": torch.from_numpy(self._rates.copy())}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        rates = state["rates"].to(torch.float64).numpy(force=True)
        if rates.shape != self._rates.shape:
            raise ValueError(f"saved rates have shape {rates.shape}, this CTAugment needs {self._rates.shape}")
        self._rates = rates.copy()

    def _draw_bins(self, choices: Tensor, spots: Tensor) -> Tensor:
        """Draw bins in proportion to their weights from uniform `spots` in [0, 1): int64 (N, depth, parameters)."""
        edges = torch.from_numpy(self.weights().cumsum(axis=2))[choices]
        bins = (spots[..., None] * edges[..., -1:] >= edges).sum(3)
        return torch.minimum(bins, (torch.from_numpy(_BINS)[choices] - 1).clamp_(min=0))
