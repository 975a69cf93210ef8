"""AttFeat (Kuo et al., ECCV 2020): features refined by attention to prototypes of all classes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.networks.dropout import Dropout


class AttentionRefiner(nn.Module):
    """x -> x_g = ReLU(x + W [head_1 .. head_H]), Eqs. (3) to (5) of its paper.

    head_i = ReLU(W_i [w_i phi_i(P); phi_i(x)]) and w_i = softmax(phi_i(x) phi_i(P)^T / sqrt(d / H)), with the same embedding
    phi_i: d -> d / H for features x and prototypes P, and dropout on w_i.
    """

    prototypes: Tensor  # (P, D), of which only the filled ones count
    filled: Tensor  # bool (P,)
    ready: Tensor  # bool, whether prototypes were ever set; until then features pass unchanged in eval mode

    def __init__(self, features: int, prototypes: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.width = max(1, features // heads)
        self.embedding = nn.Linear(features, heads * self.width)
        self.mixers = nn.ModuleList(nn.Linear(2 * self.width, self.width) for _ in range(heads))
        self.combination = nn.Linear(heads * self.width, features)
        self.dropout = Dropout(dropout)
        self.register_buffer("prototypes", torch.zeros(prototypes, features))
        self.register_buffer("filled", torch.ones(prototypes, dtype=torch.bool))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, features: Tensor) -> Tensor:
        """x_g (N, D) of features x (N, D)."""
        images = self._embedded(features)
        prototypes = self._embedded(self.prototypes)
        scores = images @ prototypes.transpose(1, 2) / math.sqrt(self.width)
        attention = self.dropout(scores.masked_fill(~self.filled, -torch.inf).softmax(dim=2))
        pairs = torch.cat([attention @ prototypes, images], dim=2)
        mixed = [F.relu(mixer(pair)) for mixer, pair in zip(self.mixers, pairs, strict=True)]
        refined = F.relu(features + self.combination(torch.cat(mixed, dim=1)))
        return refined if self.training else torch.where(self.ready, refined, features)

    @torch.no_grad()
    def remember(self, prototypes: Tensor, filled: Tensor) -> None:
        """Attend to these from now on: (P, D) and which of them are there."""
        self.prototypes.copy_(prototypes)
        self.filled.copy_(filled)
        self.ready.fill_(True)

    def description(self) -> dict[str, int]:
        """What building it again takes, beside the width of the features."""
        return {"prototypes": len(self.prototypes), "heads": self.heads}

    def _embedded(self, values: Tensor) -> Tensor:
        """The embeddings phi of (N, D) values: (H, N, D / H)."""
        embedded: Tensor = self.embedding(values)
        return embedded.reshape(len(values), self.heads, self.width).transpose(0, 1)
