"""A network with its heads, its outputs, and the one forward pass over all views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from crmatch.distributed.process_group import SINGLE_PROCESS
from crmatch.networks.attention import AttentionRefiner

ROTATIONS = 4
REFINER = "refiner"


class Outputs(NamedTuple):
    """Three points of the paper's Figure 2.

    Attributes:
        feature_map: (N, D, h, w), point (a).
        features: (N, D), point (b), after global average pooling; of length 1 if the network normalizes them.
        logits: (N, K).
    """

    feature_map: Tensor
    features: Tensor
    logits: Tensor


BackboneOutputs = Tensor | tuple[Tensor, Tensor]
"""A feature map (N, D, h, w), or the map and the backbone's own pooled features (N, P)."""


def split_outputs(outputs: BackboneOutputs) -> tuple[Tensor, Tensor]:
    """Points (a) and (b): the feature map, and the pooled features or, if there are none, the mean of the map over pixels."""
    feature_map, features = (outputs, None) if isinstance(outputs, Tensor) else outputs
    if feature_map.requires_grad:
        # Heads that flatten the map return gradients in the other memory layout, which would slow down the backbone.
        feature_map.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient.contiguous(memory_format=torch.channels_last)
        )
    if features is None:
        features = F.avg_pool2d(feature_map, feature_map.shape[2:]).flatten(start_dim=1)
    return feature_map, features


class NetworkShape(NamedTuple):
    """Sizes that heads and running state depend on.

    Attributes:
        feature_map: (D, h, w) of point (a).
        classes: K.
        unlabeled: number of unlabeled images, for state that is kept per image.
        pooled: width of point (b) if it is not D.
    """

    feature_map: tuple[int, int, int]
    classes: int
    unlabeled: int = 0
    pooled: int | None = None

    @property
    def features(self) -> int:
        """The width of point (b)."""
        return self.feature_map[0] if self.pooled is None else self.pooled


class Network(nn.Module):
    """Backbone f, classifier g, and the heads that a method trains in addition.

    A head named `refiner` maps features to features that classify better (FeatMatch). In eval mode the logits come from its
    output, and it is part of the deployed model; in training the method applies it.

    Distributed: the backbone is data-parallel. Feature maps are all-gathered, and heads and losses run replicated on the full
    batch.
    """

    def __init__(
        self, backbone: nn.Module, classifier: nn.Linear, heads: Mapping[str, nn.Module], normalize_features: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = classifier
        self.heads = nn.ModuleDict(dict(heads))
        self.normalize_features = normalize_features
        self.map_size: tuple[int, int] | None = None
        """(h, w) of the feature maps that the heads take; those of smaller images are enlarged to it in training."""
        self.processes = SINGLE_PROCESS
        self.autocast: torch.dtype | None = None
        """Type of the backbone's activations in training; None: the type of its weights."""

    def forward(self, images: Tensor) -> Outputs:
        """Outputs of normalized images (N, C, H, W), in the type of the images."""
        # Evaluation calls `forward` directly and so skips compiled code, which would compile once for each batch size.
        backbone = self._training_pass if self.training else self.backbone.forward
        outputs = self.processes.run_data_parallel(backbone, to_channels_last(images))
        feature_map, features = split_outputs(outputs)
        if self.training and self.map_size not in (None, feature_map.shape[2:]):
            feature_map = F.interpolate(feature_map, size=self.map_size, mode="bilinear")
        if self.normalize_features:
            features = F.normalize(features, dim=1)
        refines = REFINER in self.heads and not self.training
        return Outputs(feature_map, features, self.classifier(self.head(REFINER, features) if refines else features))

    def _training_pass(self, images: Tensor) -> BackboneOutputs:
        """The backbone's training pass, compiled or in half precision if the run asks for it."""
        if self.autocast is None:
            return cast(BackboneOutputs, self.backbone(images))
        with torch.autocast(images.device.type, self.autocast):
            outputs: BackboneOutputs = self.backbone(images)
        if isinstance(outputs, Tensor):
            return outputs.to(images.dtype)
        feature_map, features = outputs
        return feature_map.to(images.dtype), features.to(images.dtype)

    def head(self, name: str, inputs: Tensor) -> Tensor:
        """The head `name` applied to `inputs`."""
        return cast(Tensor, self.heads[name](inputs))

    def state(self, name: str) -> dict[str, Tensor]:
        """The buffers of the head `name`, to be changed in place; empty if there is no such head."""
        return dict(self.heads[name].named_buffers()) if name in self.heads else {}

    def deployed_state(self) -> dict[str, Tensor]:
        """The tensors that prediction needs, on the CPU: backbone, classifier and refiner."""
        deployed = ("backbone.", "classifier.", f"heads.{REFINER}.")
        state = {name: tensor for name, tensor in self.state_dict().items() if name.startswith(deployed)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def refiner_description(self) -> dict[str, int] | None:
        """The arguments that build the refiner again; None if there is none."""
        if REFINER not in self.heads:
            return None
        refiner = self.heads[REFINER]
        assert isinstance(refiner, AttentionRefiner)
        return refiner.description()

    def save_memory(self, **switches: bool) -> None:
        """Choose how the blocks train; blocks that have no such switch stay as they are.

        `lean` fuses norm, activation and convolution (low_memory/norm_act_conv.py): less memory, a little faster, CPU only.
        `recompute` recomputes activations in the backward pass (low_memory/recompute.py): far less memory, a third slower.
        """
        for module in self.modules():
            for name, value in switches.items():
                if hasattr(module, name):
                    setattr(module, name, value)

    def channels_last(self) -> Network:
        """Put the kernels into the memory layout that convolutions prefer."""
        for parameter in self.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return self


def forward_together(network: Network, views: Mapping[str, Tensor]) -> dict[str, Outputs]:
    """One pass over the concatenation of all views, split again by name, so that all views share batch statistics."""
    outputs = network(torch.cat(list(views.values())))
    sizes = [len(images) for images in views.values()]
    parts = zip(*(part.split(sizes) for part in outputs), strict=True)
    return {name: Outputs(*group) for name, group in zip(views, parts, strict=True)}


def projection_head(inputs: int, width: int, kind: Literal["linear", "mlp"]) -> nn.Module:
    """Z of Eq. (2): one linear layer, or two with a ReLU between them and hidden width `width`."""
    if kind == "linear":
        return nn.Linear(inputs, width)
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width))


def rotation_head(features: int) -> nn.Module:
    """H of Eq. (7): Linear, ReLU, Linear from the pooled features to the four rotations."""
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, ROTATIONS))


class RunningState(nn.Module):
    """State that a method keeps from step to step, as buffers, so that checkpoints hold it."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, value)


def to_channels_last(images: Tensor) -> Tensor:
    """Images in channels_last memory, gray ones (N, 1, H, W) included.

    With one channel both layouts are the same bytes, and torch would keep contiguous strides. A network that mixes layouts is
    a seventh slower, so the strides are set explicitly.
    """
    images = images.contiguous(memory_format=torch.channels_last)
    if images.shape[1] > 1:
        return images
    height, width = images.shape[2:]
    return images.as_strided(images.shape, (height * width, 1, width, 1))
