"""MixUp (Zhang et al., ICLR 2018): draw shares and partners, then mix anything that has one row per image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Mixing(NamedTuple):
    """How N images are mixed: row i becomes share_i * row_i + (1 - share_i) * row_partner_i.

    Attributes:
        share: float64 (N,), lam.
        partner: int64 (N,).
    """

    share: Tensor
    partner: Tensor

    def apply(self, values: Tensor) -> Tensor:
        """`values` (N, ...) mixed row by row."""
        import torch

        share = self.share.to(values.dtype).reshape(-1, *[1] * (values.ndim - 1))
        return torch.lerp(values.index_select(0, self.partner), values, share)


def draw_mixing(
    count: int,
    alpha: float,
    generator: torch.Generator,
    device: torch.device,
    *,
    per: Literal["sample", "batch"] = "sample",
    keep_larger: bool = True,
    partner: Literal["random", "reversed"] = "random",
) -> Mixing:
    """Shares lam ~ Beta(alpha, alpha) and partners for `count` images.

    Args:
        count: N.
        alpha: of the Beta distribution.
        generator: the step's own.
        device: where the images are.
        per: one share for each image, or one for all of them.
        keep_larger: take max(lam, 1 - lam), so that every image stays mostly itself.
        partner: a random permutation, or the batch in reverse order.
    """
    import torch

    shape = torch.full((2, count if per == "sample" else 1), alpha, dtype=torch.float64)
    gamma = torch._standard_gamma(shape, generator=generator)
    share = gamma[0] / gamma.sum(dim=0)
    if keep_larger:
        share = torch.maximum(share, 1 - share)
    partners = torch.randperm(count, generator=generator) if partner == "random" else torch.arange(count - 1, -1, -1)
    return Mixing(share.expand(count).to(device), partners.to(device))
