"""Networks of `transformers` and `timm` as bodies: normalized images in, feature map and pooled features out."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from crmatch.errors import RequestError


def check_size(images: Tensor, multiple_of: int, fixed: bool = False) -> None:
    """Refuse sizes that a vision transformer would crop without notice; if `fixed`, all but multiple_of x multiple_of."""
    height, width = images.shape[-2:]
    if fixed and not height == width == multiple_of:
        raise RequestError(
            f"images of {height} x {width} pixels do not fit this backbone, which takes {multiple_of} x {multiple_of} only.\n"
            "Use that size, or another backbone"
        )
    if height % multiple_of or width % multiple_of:
        nearest = max(1, round(height / multiple_of)) * multiple_of
        raise RequestError(
            f"images of {height} x {width} pixels do not fit this backbone: their sides must be multiples of {multiple_of}.\n"
            f"The nearest size is {nearest}"
        )


def tokens_as_map(tokens: Tensor, images: Tensor) -> Tensor:
    """Patch tokens (N, h w, D), row by row, of images (N, 3, H, W) as a map (N, D, h, w) with h / w = H / W."""
    count, (height, width) = tokens.shape[1], images.shape[-2:]
    rows = round(math.sqrt(count * height / width))
    if rows == 0 or count % rows:
        raise RequestError(f"this backbone returns {count} tokens, which form no grid.\nUse another backbone")
    return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, rows, count // rows)


class TransformersBody(nn.Module):
    """A model of `transformers`.

    Args:
        model: made by AutoModel.
        prefix_tokens: how many class and register tokens come before the patch tokens.
        multiple_of: image sizes must be a multiple of this.
        interpolate: whether the model must be told to interpolate its position embeddings for other sizes than its own.
    """

    def __init__(self, model: nn.Module, prefix_tokens: int, multiple_of: int, interpolate: bool) -> None:
        super().__init__()
        self.model = model
        self.prefix_tokens = prefix_tokens
        self.multiple_of = multiple_of
        self.options = {"interpolate_pos_encoding": True} if interpolate else {}

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D, h, w) and (N, D).

        The pooled vector is the model's own. For plain convolutional networks it is the mean of the map; ConvNeXt normalizes
        that mean. Transformers have a class token or an attention pooling. Without any of these, it is the mean of the map.
        """
        check_size(images, self.multiple_of)
        output = self.model(images, **self.options)
        hidden: Tensor = output.last_hidden_state
        feature_map = tokens_as_map(hidden[:, self.prefix_tokens :], images) if hidden.ndim == 3 else hidden
        if output.pooler_output is not None:
            return feature_map, output.pooler_output.flatten(start_dim=1)  # (N, D, 1, 1) in ResNet
        return feature_map, hidden[:, 0] if self.prefix_tokens else feature_map.mean(dim=(2, 3))


class TimmBody(nn.Module):
    """A model of `timm` without its classifier; see `check_size` for the other arguments."""

    def __init__(self, model: Any, multiple_of: int, fixed_size: bool) -> None:
        super().__init__()
        self.model = model
        self.multiple_of = multiple_of
        self.fixed_size = fixed_size

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(N, D, h, w) and what the classifier would get, (N, P). P differs from D in MobileNetV3 and V4."""
        check_size(images, self.multiple_of, self.fixed_size)
        features: Tensor = self.model.forward_features(images)
        pooled: Tensor = self.model.forward_head(features, pre_logits=True)
        if features.ndim == 3:
            prefix_tokens = getattr(self.model, "num_prefix_tokens", 0)
            return tokens_as_map(features[:, prefix_tokens:], images), pooled
        if getattr(self.model, "output_fmt", "NCHW") == "NHWC":  # Swin
            features = features.permute(0, 3, 1, 2)
        return features, pooled
