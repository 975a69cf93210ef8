"""Confidence rules: the pseudo-label of each unlabeled image, and its weight in the loss.

c is the confidence max p of the weak view's prediction p, k its class. Rules by FixMatch's field `mask`:

    fixed  1{c > tau}                                                                          FixMatch
    flex   1{c > tau * b_k / (2 - b_k)}, b_k: confident images of class k / of the top class   FlexMatch
    free   1{c > t * m_k / max m}, t and m: running averages of c and of p                     FreeMatch
    soft   exp(-(c - mean)^2 / (2 var / sigmas^2)) below the running mean of c, 1 above it     SoftMatch
    ada    1{c > tau * mean confidence on the labeled images of the step}                      AdaMatch

Field `alignment`: p becomes Normalize(p * target / running average of p), and the target is uniform, or the running average
of the predictions on labeled images, which starts uniform. Averages are updated with the current batch first, then used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from crmatch.methods.fixmatch import FixMatch

Ties = Literal["exclude", "include"]
Mask = Literal["fixed", "flex", "free", "soft", "ada"]
Alignment = Literal["none", "uniform", "labeled"]


def initial_state(rule: FixMatch, classes: int, unlabeled: int) -> dict[str, Tensor]:
    """Running state of a rule before the first step; empty for a fixed threshold without alignment."""
    import torch

    uniform = torch.full((classes,), 1 / classes)
    state: dict[str, Tensor] = {}
    if rule.mask == "flex":
        state["last_label"] = torch.full((unlabeled,), -1)  # last confident class of every image, -1: none yet
    if rule.mask == "free":
        state |= {"confidence": torch.tensor(1 / classes), "prediction": uniform, "histogram": uniform.clone()}
    if rule.mask == "soft":
        state |= {"mean": torch.tensor(1 / classes), "variance": torch.tensor(1.0)}
    if rule.alignment != "none":
        state |= initial_average(classes)
    if rule.alignment == "labeled":
        state["aligned_to"] = uniform.clone()
    return state


def initial_average(classes: int) -> dict[str, Tensor]:
    """State of `follow_predictions` before the first step."""
    import torch

    return {"started": torch.tensor(0.0), "aligned_from": torch.full((classes,), 1 / classes)}  # started: 1 after one batch


def follow_predictions(state: Mapping[str, Tensor], probabilities: Tensor, decay: float) -> Tensor:
    """The running average (K,) of mean predictions, this batch (N, K) included; it starts at the mean of the first batch."""
    import torch

    started = state["started"]
    pace = torch.where(started > 0, torch.full_like(started, 1 - decay), torch.ones_like(started))
    started.fill_(1)
    return state["aligned_from"].lerp_(probabilities.mean(dim=0), pace)


def select(
    rule: FixMatch, weak: Tensor, labeled: Tensor | None, images: Tensor, state: Mapping[str, Tensor], decay: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Pseudo-labels and weights of one batch; updates the running state in place.

    Args:
        rule: the method, for its fields `mask`, `alignment`, `threshold`, `ties`, `free_...` and `soft_sigmas`.
        weak: (N, K) probabilities of the weak views, without gradient.
        labeled: (B, K) probabilities of the labeled images; None if they are not part of the batch.
        images: int64 (N,), positions of the unlabeled images in their pool.
        state: running state.
        decay: of the running averages.

    Returns:
        Soft labels (N, K), hard labels int64 (N,), and the weight of each image in the loss, (N,): bool, or 0..1 for `soft`.
    """
    aligned = weak if rule.alignment == "none" else _aligned(rule.alignment, weak, labeled, state, decay)
    # SoftMatch aligns confidences only; its pseudo-label is the class of the raw prediction.
    probabilities = weak if rule.mask == "soft" else aligned
    confidence, labels = aligned.amax(dim=1), probabilities.argmax(dim=1)
    threshold: Tensor | float = rule.threshold
    if rule.mask == "soft":
        return probabilities, labels, _soft_weights(confidence, state, decay, rule.soft_sigmas)
    if rule.mask == "flex":
        threshold = _flex_thresholds(rule, confidence, labels, images, state["last_label"], weak.shape[1])
    elif rule.mask == "free":
        threshold = _free_thresholds(rule, aligned, confidence, labels, state, decay)
    elif rule.mask == "ada":
        assert labeled is not None
        threshold = rule.threshold * labeled.amax(dim=1).mean()
    return probabilities, labels, above(confidence, threshold, rule.ties)


def above(confidence: Tensor, threshold: Tensor | float, ties: Ties) -> Tensor:
    """1{c > tau} (`exclude`, as the paper prints) or 1{c >= tau} (`include`, as FixMatch's and USB's code): bool (N,)."""
    return confidence > threshold if ties == "exclude" else confidence >= threshold


def _aligned(alignment: Alignment, weak: Tensor, labeled: Tensor | None, state: Mapping[str, Tensor], decay: float) -> Tensor:
    import torch

    from crmatch.losses import align

    average = follow_predictions(state, weak, decay)
    target = torch.full_like(average, 1 / weak.shape[1])
    if alignment == "labeled":
        assert labeled is not None
        target = state["aligned_to"].lerp_(labeled.mean(dim=0), 1 - decay)
    return align(weak, target, average)


def _flex_thresholds(
    rule: FixMatch, confidence: Tensor, labels: Tensor, images: Tensor, last_label: Tensor, classes: int
) -> Tensor:
    """FlexMatch's threshold tau * b_k / (2 - b_k) for each image's class k, (N,); 0 at the start of a run.

    b_k = s_k / max(max_k s_k, number of images that were never confident), s_k: images whose last confident label is k.
    The thresholds are those of the step before: the confident labels of this step are written to `last_label` afterwards.
    """
    import torch

    counts = torch.zeros(classes + 1, dtype=confidence.dtype, device=confidence.device)  # [0]: never confident
    counts.index_add_(0, last_label + 1, torch.ones_like(last_label, dtype=counts.dtype))
    share = counts[1:] / counts.max().clamp(min=1)
    # Unconfident labels are written to a dummy slot at the end: an image can occur twice in a batch, and its unconfident copy
    # must not overwrite the confident one.
    slots = torch.where(confidence >= rule.threshold, images, len(last_label))
    last_label.copy_(torch.cat([last_label, last_label.new_empty(1)]).index_put((slots,), labels)[:-1])
    return rule.threshold * (share / (2 - share))[labels]


def _free_thresholds(
    rule: FixMatch, weak: Tensor, confidence: Tensor, labels: Tensor, state: Mapping[str, Tensor], decay: float
) -> Tensor:
    """FreeMatch's threshold t * m_k / max m for each image's class k, (N,)."""
    from crmatch.losses import class_shares

    level = confidence.mean() if rule.free_quantile is None else confidence.quantile(rule.free_quantile)
    state["confidence"].lerp_(level, 1 - decay)
    if rule.free_clip is not None:
        state["confidence"].clamp_(max=rule.free_clip)
    state["prediction"].lerp_(weak.mean(dim=0), 1 - decay)
    state["histogram"].lerp_(class_shares(labels, weak.shape[1], weak.dtype), 1 - decay)  # for the fairness term
    return (state["confidence"] * state["prediction"] / state["prediction"].max())[labels]


def _soft_weights(confidence: Tensor, state: Mapping[str, Tensor], decay: float, sigmas: float) -> Tensor:
    """SoftMatch's weights, (N,): 1 above the running mean of confidences, a Gaussian of their running variance below it."""
    state["mean"].lerp_(confidence.mean(), 1 - decay)
    state["variance"].lerp_(confidence.var(unbiased=len(confidence) > 1), 1 - decay)
    below = (confidence - state["mean"]).clamp(max=0)
    return (-below.square() * sigmas**2 / (2 * state["variance"].clamp(min=1e-12))).exp()
