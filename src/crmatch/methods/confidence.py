"""Confidence rules: which pseudo-labels count, and how much (spec section 8).

A rule may remember: averages over batches, or the last confident label of every image. What it remembers are buffers of the
network's head `mask`, changed in place here, so that checkpoints hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Ties = Literal["exclude", "include"]
Mask = Literal["fixed", "flex", "free", "soft", "ada"]
Alignment = Literal["none", "uniform", "labeled"]
State = Mapping[str, "Tensor"]


class Selection(NamedTuple):
    """What a rule decides about N unlabeled images.

    Attributes:
        probabilities: (N, K), the soft labels.
        labels: int64 (N,), the hard labels.
        weights: (N,), how much each image counts: bool, or 0..1 for the soft rule.
    """

    probabilities: Tensor
    labels: Tensor
    weights: Tensor


class ConfidenceRule(NamedTuple):
    """One of the rules with its numbers.

    `fixed`  c > threshold (FixMatch).
    `flex`   c > threshold * b / (2 - b), b = how often the predicted class was confident so far, relative to the most
             frequent class, or to the images never confident if those are more (FlexMatch).
    `free`   c > t * p_c / max p: t follows the mean confidence, p the mean prediction (FreeMatch).
    `soft`   weight exp(-min(0, c - mean)^2 / (2 var / sigmas^2)), mean and variance of confidences followed (SoftMatch).
    `ada`    c > threshold * mean confidence on the labeled images of the step (AdaMatch).

    Alignment multiplies predictions by target / (followed mean prediction) and normalizes them; the target is `uniform` or the
    followed mean prediction on `labeled` images. The soft rule aligns confidences only, all others the labels as well.
    """

    mask: Mask
    alignment: Alignment
    threshold: float
    ties: Ties
    decay: float
    quantile: float | None
    clip: float | None
    sigmas: float

    def state(self, classes: int, unlabeled: int) -> dict[str, Tensor]:
        """What the rule remembers, as it is before the first step; `started` is 0 until averages have seen a batch."""
        import torch

        uniform = torch.full((classes,), 1 / classes)
        state: dict[str, Tensor] = {}
        if self.mask == "flex":
            state["last_label"] = torch.full((unlabeled,), -1)
        if self.mask == "free":
            state |= {"confidence": torch.tensor(1 / classes), "prediction": uniform, "histogram": uniform.clone()}
        if self.mask == "soft":
            state |= {"mean": torch.tensor(1 / classes), "variance": torch.tensor(1.0)}
        if self.alignment != "none":
            state |= {"started": torch.tensor(0.0), "aligned_from": uniform.clone()}
        if self.alignment == "labeled":
            state["aligned_to"] = uniform.clone()
        return state

    def select(self, weak: Tensor, labeled: Tensor | None, images: Tensor, state: State) -> Selection:
        """Decide, and remember.

        Args:
            weak: (N, K) probabilities of the weak views, without gradient.
            labeled: (B, K) probabilities of the labeled images, for the rules that ask for them.
            images: int64 (N,), positions of the unlabeled images in their pool.
            state: what is remembered; changed in place.
        """
        aligned = weak if self.alignment == "none" else self._aligned(weak, labeled, state)
        believed = weak if self.mask == "soft" else aligned
        confidence, labels = aligned.amax(dim=1), believed.argmax(dim=1)
        return Selection(believed, labels, self._weights(aligned, confidence, labels, labeled, images, state))

    def _weights(
        self, weak: Tensor, confidence: Tensor, labels: Tensor, labeled: Tensor | None, images: Tensor, state: State
    ) -> Tensor:
        if self.mask == "flex":
            return flex_mask(confidence, labels, images, state["last_label"], weak.shape[1], self.threshold, self.ties)
        if self.mask == "free":
            thresholds = self._free_thresholds(weak, confidence, labels, state)
            return above(confidence, thresholds[labels], self.ties)
        if self.mask == "soft":
            return self._soft_weights(confidence, state)
        if self.mask == "ada":
            assert labeled is not None
            return above(confidence, self.threshold * labeled.amax(dim=1).mean(), self.ties)
        return above(confidence, self.threshold, self.ties)

    def _aligned(self, weak: Tensor, labeled: Tensor | None, state: State) -> Tensor:
        """Averages take in the batch first, the first one entirely; then they are used."""
        import torch

        from crmatch.losses import align

        started = state["started"]
        pace = torch.where(started > 0, torch.full_like(started, 1 - self.decay), torch.ones_like(started))
        state["aligned_from"].lerp_(weak.mean(dim=0), pace)
        started.fill_(1)
        target = torch.full_like(state["aligned_from"], 1 / weak.shape[1])
        if self.alignment == "labeled":
            assert labeled is not None
            target = state["aligned_to"].lerp_(labeled.mean(dim=0), pace)
        return align(weak, target, state["aligned_from"])

    def _free_thresholds(self, weak: Tensor, confidence: Tensor, labels: Tensor, state: State) -> Tensor:
        """One threshold per class, t * p_c / max p, after t, p and the histogram of labels took in the batch."""
        from crmatch.losses import class_shares

        level = confidence.mean() if self.quantile is None else confidence.quantile(self.quantile)
        state["confidence"].lerp_(level, 1 - self.decay)
        if self.clip is not None:
            state["confidence"].clamp_(max=self.clip)
        state["prediction"].lerp_(weak.mean(dim=0), 1 - self.decay)
        state["histogram"].lerp_(class_shares(labels, weak.shape[1], weak.dtype), 1 - self.decay)
        return state["confidence"] * state["prediction"] / state["prediction"].max()

    def _soft_weights(self, confidence: Tensor, state: State) -> Tensor:
        """1 above the followed mean, a Gaussian of the followed variance below it."""
        state["mean"].lerp_(confidence.mean(), 1 - self.decay)
        state["variance"].lerp_(confidence.var(unbiased=len(confidence) > 1), 1 - self.decay)
        below = (confidence - state["mean"]).clamp(max=0)
        return (-below.square() * self.sigmas**2 / (2 * state["variance"].clamp(min=1e-12))).exp()


def above(confidence: Tensor, threshold: Tensor | float, ties: Ties) -> Tensor:
    """1{c > tau} (`exclude`, as the paper prints) or 1{c >= tau} (`include`, as FixMatch's and USB's code): bool (N,)."""
    return confidence > threshold if ties == "exclude" else confidence >= threshold


def flex_mask(
    confidence: Tensor, labels: Tensor, images: Tensor, last_label: Tensor, classes: int, threshold: float, ties: Ties
) -> Tensor:
    """FlexMatch's curriculum: masks with the thresholds of the step before, then remembers the step's confident labels.

    s_c counts the images whose last confident label is c; b_c = s_c / max(max_c s_c, images never confident);
    threshold of class c: threshold * b_c / (2 - b_c), 0 at the start.

    Args:
        confidence: (N,).
        labels: int64 (N,), predicted classes.
        images: int64 (N,), positions in the pool.
        last_label: int64 (pool,), -1 where an image was never confident; changed in place.
        classes: K.
        threshold: tau.
        ties: whether a confidence equal to a threshold counts.
    """
    import torch

    counts = torch.zeros(classes + 1, dtype=confidence.dtype, device=confidence.device)
    counts.index_add_(0, last_label + 1, torch.ones_like(last_label, dtype=counts.dtype))
    share = counts[1:] / counts.max().clamp(min=1)
    selected = above(confidence, threshold * (share / (2 - share))[labels], ties)
    # Unconfident labels go past the end: an image may be twice in a batch, and one look must not undo the other.
    places = torch.where(confidence >= threshold, images, len(last_label))
    last_label.copy_(torch.cat([last_label, last_label.new_empty(1)]).index_put((places,), labels)[:-1])
    return selected
