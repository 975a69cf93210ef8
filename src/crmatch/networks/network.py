"""Heads that are used in training only (spec section 1.3).

What a network returns, and the one pass over all views.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.distributed.process_group import SINGLE_PROCESS
from crmatch.networks.attention import AttentionRefiner
from crmatch.networks.fork import with_pooled

ROTATIONS = 4


def projection_head(inputs: int, width: int, kind: Literal["linear", "mlp"]) -> nn.Module:
    """Z of Eq. (2): one linear layer, or two with a ReLU between them whose hidden width is `width`."""
    if kind == "linear":
        return nn.Linear(inputs, width)
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width))


class RunningState(nn.Module):
    """What a method remembers from step to step: buffers without a function, so that checkpoints hold them."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, value)


def linear_head(inputs: int, outputs: int) -> nn.Module:
    """One linear layer on the pooled features: ReMixMatch's rotation head, Mean Teacher's second classifier."""
    return nn.Linear(inputs, outputs)


def rotation_head(features: int) -> nn.Module:
    """H of Eq. (7): Linear, ReLU, Linear from the pooled features to the four rotations."""
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, ROTATIONS))


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


REFINER = "refiner"


def to_channels_last(images: Tensor) -> Tensor:
    """Images in channels_last memory, gray ones (N, 1, H, W) with the strides that say so.

    Both layouts of one channel are the same bytes; torch takes contiguous strides for the other layout, and a network that
    mixes layouts is a seventh slower.
    """
    images = images.contiguous(memory_format=torch.channels_last)
    if images.shape[1] > 1:
        return images
    height, width = images.shape[2:]
    return images.as_strided(images.shape, (height * width, 1, width, 1))


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
    """Backbone f, classifier g, and the heads a method trains beside them.

    A head named `refiner` maps features to features that classify better (FeatMatch). In eval mode logits come from its
    output, and it is part of the deployed model; in training the method itself says where it applies.

    Where processes share a run, each of them computes the feature maps of some of the images, and all of them the rest.
    """

    def __init__(
        self, backbone: nn.Module, classifier: nn.Linear, heads: Mapping[str, nn.Module], normalize_features: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = classifier
        self.heads = nn.ModuleDict(dict(heads))
        self.normalize_features = normalize_features
        self.processes = SINGLE_PROCESS
        self.autocast: torch.dtype | None = None
        """Type of the backbone's values in training; None: that of its weights."""

    def forward(self, images: Tensor) -> Outputs:
        """Outputs of normalized images (N, C, H, W), in the type of the images."""
        feature_map = self.processes.run_data_parallel(
            self._training_pass if self.training else self.backbone.forward, to_channels_last(images)
        )
        feature_map, features = with_pooled(feature_map)
        if self.normalize_features:
            features = F.normalize(features, dim=1)
        refines = REFINER in self.heads and not self.training
        return Outputs(feature_map, features, self.classifier(self.head(REFINER, features) if refines else features))

    def _training_pass(self, images: Tensor) -> Tensor:
        """The backbone's pass, compiled and in half precision where the run is; in eval mode it is as a model's user has it."""
        if self.autocast is None:
            return cast(Tensor, self.backbone(images))
        with torch.autocast(images.device.type, self.autocast):
            return cast(Tensor, self.backbone(images)).to(images.dtype)

    def deployed_state(self) -> dict[str, Tensor]:
        """What prediction needs, on the CPU: backbone, classifier and refiner; no other heads, no running state of a method."""
        deployed = ("backbone.", "classifier.", f"heads.{REFINER}.")
        state = {name: tensor for name, tensor in self.state_dict().items() if name.startswith(deployed)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def refiner_description(self) -> dict[str, int] | None:
        """What building the refiner again takes; None where there is none."""
        if REFINER not in self.heads:
            return None
        refiner = self.heads[REFINER]
        assert isinstance(refiner, AttentionRefiner)
        return refiner.description()

    def channels_last(self) -> Network:
        """This network with its kernels in the layout that convolutions prefer."""
        for parameter in self.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return self

    def head(self, name: str, inputs: Tensor) -> Tensor:
        """The head `name` applied to `inputs`."""
        return cast(Tensor, self.heads[name](inputs))

    def state(self, name: str) -> dict[str, Tensor]:
        """The buffers of the head `name`, to be changed in place; none where there is no such head."""
        return dict(self.heads[name].named_buffers()) if name in self.heads else {}


def forward_together(network: Network, views: Mapping[str, Tensor]) -> dict[str, Outputs]:
    """One pass over the concatenation of all views, split again by name, so that batch statistics mix all groups."""
    outputs = network(torch.cat(list(views.values())))
    sizes = [len(images) for images in views.values()]
    parts = zip(*(part.split(sizes) for part in outputs), strict=True)
    return {name: Outputs(*group) for name, group in zip(views, parts, strict=True)}
