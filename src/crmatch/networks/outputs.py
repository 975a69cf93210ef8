"""What a network returns, and the one pass over all views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Outputs(NamedTuple):
    """Three points of the paper's Figure 2.

    Attributes:
        feature_map: (N, D, h, w), point (a).
        features: (N, D), point (b), after global average pooling; of length 1 where the network normalizes them.
        logits: (N, K).
    """

    feature_map: Tensor
    features: Tensor
    logits: Tensor


class NetworkShape(NamedTuple):
    """What heads and running state need to know.

    Attributes:
        feature_map: (D, h, w) of point (a).
        classes: K.
        unlabeled: number of unlabeled images, for memories.
    """

    feature_map: tuple[int, int, int]
    classes: int
    unlabeled: int = 0

    @property
    def features(self) -> int:
        """D, the width of point (b)."""
        return self.feature_map[0]


class Network(nn.Module):
    """Backbone f, classifier g, and the heads a method trains beside them."""

    def __init__(
        self, backbone: nn.Module, classifier: nn.Linear, heads: Mapping[str, nn.Module], normalize_features: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = classifier
        self.heads = nn.ModuleDict(dict(heads))
        self.normalize_features = normalize_features

    def forward(self, images: Tensor) -> Outputs:
        """Outputs of normalized images (N, C, H, W)."""
        feature_map = self.backbone(images)
        features = feature_map.mean(dim=(2, 3))
        if self.normalize_features:
            features = F.normalize(features, dim=1)
        return Outputs(feature_map, features, self.classifier(features))

    def deployed_state(self) -> dict[str, Tensor]:
        """What prediction needs, on the CPU: backbone and classifier, no training heads and no running state of a method."""
        state = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("heads.")}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def channels_last(self) -> Network:
        """This network with its kernels in the layout that convolutions prefer."""
        for parameter in self.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return self

    def head(self, name: str, inputs: Tensor) -> Tensor:
        """The head `name` applied to `inputs`."""
        return cast(Tensor, self.heads[name](inputs))


def forward_together(network: Network, views: Mapping[str, Tensor]) -> dict[str, Outputs]:
    """One pass over the concatenation of all views, split again by name, so that batch statistics mix all groups."""
    outputs = network(torch.cat(list(views.values())))
    sizes = [len(images) for images in views.values()]
    parts = zip(*(part.split(sizes) for part in outputs), strict=True)
    return {name: Outputs(*group) for name, group in zip(views, parts, strict=True)}
