"""MixUp (Zhang et al., ICLR 2018): draw shares and partners once, then mix images and their labels alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Mixing(NamedTuple):
    """Row i of N rows becomes share_i * row_i + (1 - share_i) * row_partner_i.

    Attributes:
        share: float64 (N,) on the CPU, lam.
        partner: int64 (N,).
    """

    share: Tensor
    partner: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """Mix the rows of `values` (N, ...)."""
        import torch

        share = self.share.to(values.dtype).to(values.device).reshape(-1, *[1] * (values.ndim - 1))
        return torch.lerp(values.index_select(0, self.partner), values, share)


def draw_mixing(
    images: Tensor,
    alpha: float,
    generator: torch.Generator,
    *,
    per: Literal["sample", "batch"] = "sample",
    keep_larger: bool = True,
    partner: Literal["random", "reversed"] = "random",
) -> Mixing:
    """Draw shares lam ~ Beta(alpha, alpha) and partners for N images.

    Args:
        images: (N, ...), for their number and device.
        alpha: of the Beta distribution.
        generator: random generator of the step, on the CPU.
        per: draw a share for each image, or one share for the batch.
        keep_larger: use max(lam, 1 - lam), so that the image itself has the larger share.
        partner: a random permutation, or the batch in reverse order.
    """
    import torch

    count = len(images)
    shape = torch.full((2, count if per == "sample" else 1), alpha, dtype=torch.float64)
    gamma = torch._standard_gamma(shape, generator=generator)  # torch.distributions.Beta takes no generator
    share = gamma[0] / gamma.sum(dim=0)
    if keep_larger:
        share = torch.maximum(share, 1 - share)
    partners = torch.randperm(count, generator=generator) if partner == "random" else torch.arange(count - 1, -1, -1)
    return Mixing(share.expand(count), partners.to(images.device))
